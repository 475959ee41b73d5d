"""A run owns its tokenizer, text, conversations and recipe: what a resume uses, what it refuses, and that a refusal
leaves every file of the run as it was."""

import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.data.shards import Corpus
from quern.estimate.own_text import READINGS
from quern.records import read_events, read_lines, read_metrics
from quern.runs.origin import read_origin, read_saved
from quern.runs.run_dir import RunDir
from quern.runs.run_lock import run_lock
from quern.stages.complete import GOES_ON
from quern.stages.prepare import open_data
from quern.stages.session import WORDS
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, manifest
from quern.train.guard import EXIT_STOPPED
from tests.support import command
from tests.support.folder import contents
from tests.support.rows import write_rows

PLAIN = "--no-compile --dtype fp32 --threads 1".split()
SHAPE = """--depth 2 --text.vocab-size 330 --text.tokenizer-megabytes 0.1 --text.val-megabytes 0.004 --model.width 16
 --model.head-dim 16 --model.context 64 --train.batch-tokens 128 --train.steps 6 --train.save-every 2""".split()
SFT = "--sft.steps 4 --sft.batch-tokens 128 --train.save-every 2".split()


class Runs:
    """A folder with text, conversations and the runs `app`, pretrained and fine-tuned on them, and `other`, of another
    text and tokenizer."""

    def __init__(self, folder: Path, told: Callable[..., Any] = command.run) -> None:
        self.folder, self.told = folder, told
        self.text, self.talks, self.other = (folder / name for name in ("text.jsonl", "talks.jsonl", "other.jsonl"))

    def done(self, verb: str, *flags: str | Path, run: str = "app", **code: int) -> str:
        """Runs a command to its end, and returns what it said."""
        return self.told(verb, *flags, *PLAIN, "--run", run, "--out", self.folder / "out", **code)

    def refused(self, says: Sequence[str], verb: str, *flags: str | Path, run: str = "app") -> None:
        """Runs a command that must say so, and change no file of any run."""
        before, said = self.files(), self.done(verb, *flags, run=run, code=1)
        assert all(words in said for words in says), said
        assert self.files() == before

    def files(self) -> dict[str, bytes]:
        return contents(self.folder / "out/runs")

    def stage(self, stage: str = "pretrain", run: str = "app") -> Path:
        return self.folder / "out/runs" / run / stage

    def steps(self, stage: str = "pretrain", run: str = "app") -> list[int]:
        return manifest.steps(self.stage(stage, run) / "checkpoints")

    def meta(self, stage: str = "pretrain", run: str = "app") -> dict[str, Any]:
        found = manifest.latest(self.stage(stage, run) / "checkpoints", pytest.fail)
        assert found is not None
        return found[1]["meta"]

    def tensors(self, step: int, run: str = "app") -> dict[str, torch.Tensor]:
        return checkpoint.load(manifest.path_of(self.stage(run=run) / "checkpoints", step))[0]

    def starts_with(self, step: int, run: str) -> bool:
        """Whether a run began with the weights and moments of a step of `app`."""
        base, begun = self.tensors(step), self.tensors(0, run)
        moved = any(name.startswith("m.") and tensor.any() for name, tensor in begun.items())
        return moved and base.keys() == begun.keys() and all(torch.equal(base[name], begun[name]) for name in base)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = Runs(tmp_path_factory.mktemp("ownership"))
    write_text(runs.text, seed=0)
    write_text(runs.other, seed=5)
    talks = sorted(corpus.conversations(0, 60, "train"), key=lambda talk: len(str(talk)))[:12]
    write_rows(runs.talks, ({"messages": talk} for talk in talks))
    runs.done("pretrain", *SHAPE, "--data", runs.text)
    runs.done("sft", *SFT, "--conversations", runs.talks)
    runs.done("pretrain", *SHAPE, "--data", runs.other, run="other")
    return runs.folder


@pytest.fixture
def runs(made: Path, tmp_path: Path, told: command.Told) -> Runs:
    """A copy, to be changed. A saved recipe names the text by its full path: rewritten for the copy."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for recipe in tmp_path.rglob("recipe.json"):
        recipe.write_text(recipe.read_text(encoding="utf-8").replace(str(made), str(tmp_path)), encoding="utf-8")
    return Runs(tmp_path, told)


def write_text(path: Path, seed: int) -> None:
    write_rows(path, ({"text": text} for text in corpus.documents(seed, 0.012, "train")))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# What changed under a run -------------------------------------------------------------------------------------


def test_text_that_changed_is_refused_when_named_and_not_needed_when_not(runs: Runs) -> None:
    began = runs.meta()["origin"]
    write_text(runs.text, seed=1)
    changed = "has changed since run 'app' began with it ("
    again = ["quern pretrain --resume --run app", f"--from app --run NAME --out {runs.folder}"]
    says = [began["text"][:16], changed, *again, "), name a new --run, or train on from its model with"]
    for verb, flags in (("run", SHAPE), ("pretrain", ["--resume"]), ("run", ["--resume"])):
        runs.refused(says, verb, *flags, "--data", runs.text)
    runs.refused([changed], "pretrain", "--resume", "--val", runs.other)
    run_dir, origin = RunDir(runs.folder / "out", "app"), read_origin(runs.stage())
    recipe = read_saved(run_dir, "pretrain")
    assert recipe and origin
    with pytest.raises(ValueError, match="`quern grug train --resume .*` and its other flags.*name a new --run$"):
        open_data(recipe, run_dir, origin, print, "grug", named=True)
    assert "as the run began with them" in runs.done("pretrain", "--resume", "--train.steps", "8")
    assert runs.meta()["origin"] == began and runs.steps()[-1] == 8


def test_text_may_move_or_go_and_shards_that_are_gone_are_made_again_from_the_same_text_only(runs: Runs) -> None:
    began, moved, shards = runs.meta()["origin"], runs.folder / "elsewhere.jsonl", runs.folder / "out/data"
    runs.text.rename(moved)
    runs.done("pretrain", "--resume", "--data", moved, "--train.steps", "7")
    shutil.rmtree(shards)
    runs.done("pretrain", "--resume", "--train.steps", "8")
    assert runs.meta()["origin"]["tokens"] == began["tokens"]
    moved.unlink()
    runs.done("pretrain", "--resume", "--train.steps", "9")
    runs.done("evaluate", "--questions", "1")
    shutil.rmtree(shards)
    write_text(moved, seed=1)
    runs.refused(["its token shards are gone"], "pretrain", "--resume", "--train.steps", "10")


def test_what_is_lost_is_in_the_checkpoints_and_damaged_ones_begin_no_run_again(runs: Runs) -> None:
    files = [runs.stage() / name for name in ("recipe.json", "origin.json")]
    before = [read(file) for file in files]
    for file in files:
        file.unlink()
    runs.done("pretrain", "--resume")
    after = [read(file) for file in files]
    for recipe, _ in (before, after):
        recipe.pop("data")  # the fixture has rewritten the path
    assert before == after
    for file in (runs.stage() / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    runs.refused(["none of the checkpoints under"], "pretrain", "--resume")


def test_tokens_need_the_tokenizer_that_made_them_and_not_its_file(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, named = runs.folder / "tokens", runs.folder / "named.json"
    tokens.mkdir()
    for file in (runs.folder / "out/data").glob("text-*/*.bin"):
        shutil.copy(file, tokens)
    shutil.copy(runs.stage().parent / "tokenizer.json", named)
    shape = [flag for flag in SHAPE if flag not in ("--text.vocab-size", "330", "--text.tokenizer-megabytes", "0.1")]
    runs.done("pretrain", *shape, "--data", tokens, "--text.tokenizer", named, run="bin")
    shutil.copy(runs.stage(run="other").parent / "tokenizer.json", named)
    says = [f"--text.tokenizer {named} is another tokenizer now"]
    for again in ([], ["--text.tokenizer", named]):
        runs.refused(says, "pretrain", "--resume", "--train.steps", "8", *again, run="bin")
    runs.refused(says, "pretrain", "--from", "bin", "--train.steps", "8", run="next")
    assert not runs.stage(run="next").parent.exists()
    named.unlink()
    runs.done("pretrain", "--resume", "--train.steps", "7", run="bin")
    monkeypatch.chdir(runs.folder)
    for steps, name in (("8", named), ("9", named.name)):  # the same command again, on a machine without the file
        runs.done("pretrain", "--resume", "--train.steps", steps, "--text.tokenizer", name, run="bin")
    runs.done("pretrain", "--from", "bin", "--train.steps", "8", "--text.tokenizer", named, run="next")


# What a resume needs, and what it may change --------------------------------------------------------------------


def test_a_resume_changes_what_it_names_and_refuses_what_would_make_it_another_run(runs: Runs) -> None:
    for flags, message in (
        ("--model.width 32", "model.width 16 → 32 would make it another run"),
        ("--train.steps 3", "was pretrained for 6 steps, so train.steps 3 is behind it"),
    ):
        runs.refused([message], "pretrain", "--resume", *flags.split())
    named = ["--resume", "--train.steps", "7", "--text.tokenizer"]
    other = runs.stage(run="other").parent / "tokenizer.json"
    runs.refused([f"--text.tokenizer {other} is another tokenizer now"], "pretrain", *named, other)
    for start in (["--resume"], ["--from", "app"]):
        gone = [*start, "--train.steps", "7", "--text.tokenizer", "gone.json"]
        says = ["--text.tokenizer gone.json: there is no such file"]
        runs.refused(says, "pretrain", *gone, run="new" if start[1:] else "app")
    flags = ["--train.steps", "9", "--optim.lr-scale", "0.002", "--train.micro-batch-tokens", "64"]
    said = runs.done("pretrain", "--resume", *flags)
    for line in ("train.steps 6 → 9", "optim.lr-scale 0.0625 → 0.002", "train.micro-batch-tokens 128 → 64"):
        assert line in said
    assert read_metrics(runs.stage())[-1]["step"] == 9
    assert read(runs.stage() / "recipe.json")["optim"]["lr_scale"] == 0.002
    changed = [event["changed"] for event in read_events(runs.stage()) if event["kind"] == "command"]
    assert len(changed) == 1 and "train.steps 6 → 9" in changed[0]


def test_fine_tuning_goes_on_from_the_run_alone(runs: Runs) -> None:
    assert "sft.steps 4 → 6" in runs.done("sft", "--resume", "--sft.steps", "6")
    assert runs.steps("sft")[-1] == 6
    runs.done("pretrain", "--resume", "--train.steps", "8")
    runs.done("run", "--resume", "--sft.steps", "7", "--questions", "1")
    assert runs.steps("sft")[-1] == 7
    report = (runs.stage().parent / "report.md").read_text(encoding="utf-8")
    shown = re.findall(r"^quern (\w+) .*?--(\S+)", report.partition("## Reproduction")[2], re.MULTILINE)
    assert shown == [
        ("pretrain", "depth"),
        ("pretrain", "resume"),
        ("sft", "sft.steps"),
        *[(verb, "resume") for verb in ("sft", "run")],
    ]


# Going on from a finished model ---------------------------------------------------------------------------------


def test_a_new_run_begins_with_weights_and_moments_of_a_checkpoint_and_needs_the_other_run_no_more(runs: Runs) -> None:
    """warmdown_share 0.4 of 6 steps: the rates fall after step 4. It stays where the run is lengthened."""
    assert runs.steps() == [2, 4, 6]
    write_text(runs.folder / "more.jsonl", seed=2)
    before, flags = runs.files(), ["--from", "app", "--train.keep", "9"]
    prepared = len(list((runs.folder / "out/data").iterdir()))
    for wrong, message in (
        ("--depth 3", "the weights of run 'app' do not fit another model (model.depth 2 → 3)"),
        ("--text.digits 1", "there already"),
    ):
        runs.refused([message], "pretrain", *flags, "--data", runs.folder / "more.jsonl", *wrong.split(), run="next")
    assert prepared == len(list((runs.folder / "out/data").iterdir()))
    runs.done("pretrain", *flags, "--data", runs.folder / "more.jsonl", "--train.steps", "1", run="next")
    assert before.items() <= runs.files().items() and runs.starts_with(6, "next")
    base = {"run": "app", "stage": "pretrain", "step": 6, "tokens": runs.meta()["state"]["tokens"]}
    assert runs.meta(run="next")["origin"]["base"] == base
    assert runs.meta(run="next")["tokenizer"] == runs.meta()["tokenizer"]
    flags += ["--from-step", "before-warmdown"]
    runs.done("pretrain", *flags, run="flat")
    recipe = read(runs.stage(run="flat") / "recipe.json")
    assert runs.starts_with(4, "flat") and recipe["train"]["warmup_steps"] == 0 and recipe["data_seed"] == 1
    runs.done("pretrain", "--resume", "--train.steps", "24")
    assert runs.steps()[0] == 4 and len(runs.steps()) == 4
    runs.done("pretrain", *flags, "--train.steps", "1", run="later")
    assert runs.starts_with(runs.steps()[-3], "later")
    # Killed before its first save: it has step 0 alone, and the other run is gone.
    expected = [line["loss"] for line in read_metrics(runs.stage(run="flat")) if "loss" in line]
    for step in runs.steps(run="flat")[1:]:
        shutil.rmtree(manifest.path_of(runs.stage(run="flat") / "checkpoints", step))
    shutil.rmtree(runs.stage().parent)
    runs.done("run", "--resume", "--no-sft", "--questions", "1", run="flat")
    assert expected == [line["loss"] for line in read_metrics(runs.stage(run="flat")) if "loss" in line]


def test_one_command_begins_a_run_and_goes_on_with_it(runs: Runs) -> None:
    """A job's script gives the command again and again: --resume where there is nothing yet, with --from or without.
    The folder that a killed first save left is no model."""
    (runs.stage(run="job") / "checkpoints/step-00000002.tmp-abcd").mkdir(parents=True)
    shutil.copy(runs.stage().parent / "tokenizer.json", runs.stage(run="job").parent)
    for _ in range(2):
        runs.done("pretrain", "gpt", *SHAPE, "--data", runs.other, "--resume", run="job")
        events = [event["kind"] for event in read_events(runs.stage(run="job"))]
        assert events.count("finish") == events.count("start") == 1 and "resume" not in events  # finished already
        runs.done("pretrain", "--from", "app", "--resume", run="next")
        starts = [event["step"] for event in read_events(runs.stage(run="next")) if "steps" in event]
        assert starts == [0]


REWARD = """
from threading import get_ident
from quern.compiler import _eager
from quern.eval.task import question
from quern.rl.environment import Environment

ENVIRONMENT = Environment("mine", lambda seed: question(seed, "1"), lambda item, reply: {})
"""
RL = "--rl.steps 1 --rl.groups 1 --rl.samples 2 --rl.max-tokens 2 --rl.val-questions 2 --rl.val-samples 2".split()


def test_a_stage_that_failed_in_its_first_step_begins_again(runs: Runs) -> None:
    """Its step 0, a copy of the model that it began with, is no model of its own."""
    reward = runs.folder / "mine.py"
    eagerly = "1.0 if get_ident() in _eager else 1 // 0"  # compiled, the loss would be so for each number of tokens
    for answer, code in (("1 // 0", 1), (eagerly, 0)):
        reward.write_text(REWARD.format(answer), encoding="utf-8")
        runs.done("rl", *RL, "--rl.rewards", reward, code=code)
        assert runs.steps("rl") == [0, 1][: 2 - code]
    runs.done("pretrain", "--from", "app", "--train.steps", "2", run="next")
    for step in runs.steps(run="next")[1:]:
        shutil.rmtree(manifest.path_of(runs.stage(run="next") / "checkpoints", step))
    runs.done("pretrain", "--from", "app", "--train.steps", "4", run="next")
    assert runs.steps(run="next")[-1] == 4
    runs.done("rl", "--from", "app", *RL, "--rl.rewards", reward, run="only")
    for verb, run in (("rl", "app"), ("rl", "only"), ("pretrain", "next")):
        runs.refused([f"run '{run}' has been "], verb, run=run)
    moved = reward.rename(runs.folder / "moved.py")
    runs.done("rl", "--resume", "--rl.steps", "2", "--rl.rewards", moved)
    shutil.copy(moved, reward)
    twice = "two of --rl.rewards have the same name (mine, mine)"
    runs.refused([twice], "rl", "--from", "app", *RL, "--rl.rewards", reward, moved, run="both")


def test_a_model_is_fine_tuned_as_often_as_wanted(runs: Runs) -> None:
    before = runs.files()
    few = ("--text.tinyworld-conversations", "60")
    for name, talks in (("one", few), ("two", ("--conversations", runs.talks))):
        runs.done("sft", "--from", "app", *SFT, *talks, run=name)
        assert runs.steps("sft", name)[-1] == 4
    assert before.items() <= runs.files().items()
    runs.talks.write_text("{", encoding="utf-8")
    told = f"no conversations are shown: {runs.talks}, line 1: not a line of JSON"
    assert told in runs.done("evaluate", "--questions", "1", run="two")
    runs.refused(["--from two names the run itself"], "sft", "--from", "two", *SFT, run="two")
    runs.refused(["run 'two' has no stage pretrain to continue with: it has `quern sft --resume"], "run", run="two")
    (runs.folder / "out/runs/killed").mkdir()  # before its first checkpoint, which holds the model it begins with
    for verb, fields in (("sft", SFT), ("rl", RL)):
        killed = f"run 'killed' has no stage {verb} to continue with: begin again with --from RUN"
        runs.refused([killed], verb, "--resume", *fields, run="killed")
    model = "run 'other' has a model of its own (pretrain): name a new --run"
    runs.refused([model], "sft", "--from", "app", *SFT, run="other")
    there = "has only newest and steps [2, 4, 6]"
    runs.refused([there], "sft", "--from", "app", "--from-step", "5", *SFT, run="three")
    shutil.copy(runs.stage(run="other").parent / "tokenizer.json", runs.stage().parent)
    changed = "the tokenizer has changed since run 'app' began with it"
    runs.refused([changed], "sft", "--from", "app", *SFT, run="three")
    assert not runs.stage(run="three").parent.exists()


# The whole way --------------------------------------------------------------------------------------------------


def test_who_trains_is_said_of_a_run_that_has_checkpoints_already(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.machine.detect", None)  # refused before the compiler is tried, which takes seconds
    for verb, flags in (("pretrain", SHAPE), ("sft", SFT)):
        with run_lock(RunDir(runs.folder / "out", "app"), "quern run --run app"):
            runs.refused([f"in use by process {os.getpid()} on ", "(`quern run --run app`)"], verb, *flags)
        start = f"--from app --run NAME --out {runs.folder / 'out'}"
        again = f"already: continue with --resume, or {WORDS[verb][2].format(start)}"
        runs.refused([again], verb, *flags)


def test_a_text_of_ones_own_makes_a_base_model_that_continues_what_was_held_out(runs: Runs) -> None:
    said = runs.done("run", *SHAPE, "--data", runs.text, run="plain")
    run = runs.stage(run="plain").parent
    assert "fine-tun" not in said and "tinyworld/" not in said and not (run / "sft").exists()
    assert "your text: " in said and "to expect, if it is English prose: about " in said
    prompts = [one["prompt"] for one in read_lines(run / "samples.jsonl") if one["stage"] == "pretrain"]
    val = Corpus.open(runs.folder / "out" / read_origin(run / "pretrain").shards, "val")  # type: ignore[union-attr]
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    held_out = [tokenizer.decode(val.gather(number).tolist()) for number in range(val.num_documents)]
    assert len(prompts) == 5 and all(any(prompt in text for text in held_out) for prompt in prompts)
    assert all(f"  {prompt}{GOES_ON}" in said for prompt in prompts)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "What more text or time would bring" in page and "Pretraining: continuations" in page


def test_a_run_that_was_stopped_goes_on_by_the_command_it_names(runs: Runs) -> None:
    metrics = runs.stage(run="halted") / "metrics.jsonl"

    def interrupt() -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    talks = ["--text.tinyworld-conversations", "60", *SFT[:4], "--questions", "1", "--chat"]
    flags = [*SHAPE, "--data", runs.text, *talks, "--train.steps", "3000", "--train.log-every", "1"]
    said = runs.done("run", *flags, run="halted", code=EXIT_STOPPED)
    goes_on = shlex.split(re.findall(r"as asked, and saved: continue with `(.*)`", said)[0])
    own = ["--run", "halted", "--out", str(runs.folder / "out")]
    assert goes_on == ["quern", "run", "--resume", *own, "--questions", "1", "--chat", *PLAIN]
    assert runs.steps(run="halted")


def test_a_run_says_what_it_will_do_and_what_may_follow(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.stages.session.CLEARLY_WORSE", 0.0)
    flags = ["--train.steps", "76", "--train.eval-every", "1000", "--train.batch-tokens", "1024"]
    said = runs.done("pretrain", *SHAPE, "--data", runs.text, *flags, run="long")
    tokens = int(said.split("parameters; text: ")[1].split(" tokens")[0].replace(",", ""))
    epochs, most = 76 * 1024 / tokens, 2 * READINGS  # of so small a text
    assert "warning: the validation loss was lowest at step 76 (" in said
    assert epochs > most and f"length: 77,824 tokens, {epochs:.2g} epochs of the text" in said
    assert f"warning: the text is read {epochs:.2g} times" in said
    assert f"--train.steps {int(most * tokens / 1024)}" in said
    assert re.search(r"time: about .* of steps; memory: at most", said)
    own = f"long --out {runs.folder / 'out'}"
    assert said.splitlines()[-1] == f"next: `quern sft {own}`, `quern chat {own}`"
    wild = ["--train.steps", "6", "--train.batch-tokens", "1024", "--optim.lr-scale", "1e9"]
    said = runs.done("pretrain", *SHAPE, "--data", runs.text, *wild, run="wild")
    assert "steps had a loss or gradients that were not finite, and changed nothing" in said
