"""A run owns its tokenizer, text, conversations and recipe: what a resume uses, what it refuses, and that a refusal
leaves every file of the run as it was."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from quern.cli import main
from quern.data.batch import GROUP_SIZE, groups_of
from quern.data.shards import Corpus
from quern.estimate.own_text import READINGS
from quern.records import read_events, read_metrics
from quern.runs.origin import read_origin
from quern.runs.run_dir import RunDir
from quern.runs.run_lock import run_lock
from quern.stages.complete import GOES_ON
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, manifest
from quern.train.guard import EXIT_STOPPED

PLAIN = "--no-compile --dtype fp32 --threads 1".split()
SHAPE = """--depth 2 --text.vocab-size 330 --text.tokenizer-megabytes 0.1 --text.val-megabytes 0.004 --model.width 16
 --model.head-dim 16 --model.context 64 --train.batch-tokens 128 --train.steps 6 --train.save-every 2""".split()
SFT = "--sft.steps 4 --sft.batch-tokens 128 --train.save-every 2".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, conversations and a run `app` that was pretrained and fine-tuned on them."""
    folder = tmp_path_factory.mktemp("ownership")
    write_text(folder / "text.jsonl", seed=0)
    write_talks(folder / "talks.jsonl", seed=0)
    data = ["--data", str(folder / "text.jsonl")]
    assert quern(folder, "pretrain", *SHAPE, *data) == 0
    assert quern(folder, "sft", *SFT, "--conversations", str(folder / "talks.jsonl")) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed. The saved recipe names the text by its full path: rewritten for the copy."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for recipe in tmp_path.rglob("recipe.json"):
        recipe.write_text(recipe.read_text(encoding="utf-8").replace(str(made), str(tmp_path)), encoding="utf-8")
    return tmp_path


def write_text(path: Path, seed: int, megabytes: float = 0.012) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in corpus.documents(seed, megabytes, "train"))


def write_talks(path: Path, seed: int) -> None:
    talks = sorted(corpus.conversations(seed, 60, "train"), key=lambda talk: len(str(talk)))[:12]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": talk}) + "\n" for talk in talks)


def quern(folder: Path, verb: str, *flags: str, run: str = "app") -> int:
    return main.main([verb, *flags, *PLAIN, "--run", run, "--out", str(folder / "out")])


def files(folder: Path, run: str = "app") -> dict[str, str]:
    """The content of every file of a run, by name, but for its lock."""
    root = folder / "out" / "runs" / run
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def steps(folder: Path, stage: str, run: str = "app") -> list[int]:
    return manifest.steps(folder / "out" / "runs" / run / stage / "checkpoints")


def meta(folder: Path, stage: str, run: str = "app") -> dict:
    found = manifest.latest(folder / "out" / "runs" / run / stage / "checkpoints", pytest.fail)
    assert found is not None
    return found[1]["meta"]


def test_a_text_of_several_groups_is_opened_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GROUP_SIZE` is beyond the texts of tests: a smaller one records what a large text does."""
    monkeypatch.setattr(groups_of, "__defaults__", (1000,))
    flags = [*SHAPE, *SFT[:4], "--data", str(folder / "text.jsonl"), "--conversations", str(folder / "talks.jsonl")]
    assert quern(folder, "run", *flags, "--questions", "1", run="large") == 0  # evaluation opens its shards
    assert meta(folder, "sft", "large")["origin"]["group_size"] == GROUP_SIZE
    assert quern(folder, "sft", "--resume", "--sft.steps", "5", run="large") == 0


# What changed under a run -------------------------------------------------------------------------------------


def test_text_that_changed_is_refused_when_named_and_not_needed_when_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, tokens = files(folder), meta(folder, "pretrain")["origin"]
    write_text(folder / "text.jsonl", seed=1)
    named = ["--data", str(folder / "text.jsonl")]
    for verb, flags in (("run", SHAPE), ("pretrain", ["--resume"]), ("run", ["--resume"])):
        assert quern(folder, verb, *flags, *named) == 1
        said = capsys.readouterr().err
        assert tokens["text"][:16] in said and "has changed since run 'app' began with it (" in said
        assert "quern pretrain --resume --run app" in said and "--from app" in said
        assert files(folder) == before
    write_text(folder / "val.jsonl", seed=8)
    assert quern(folder, "pretrain", "--resume", "--val", str(folder / "val.jsonl")) == 1
    assert "has changed since run 'app' began" in capsys.readouterr().err and files(folder) == before
    assert quern(folder, "pretrain", "--resume", "--train.steps", "8") == 0
    assert "as the run began with them" in capsys.readouterr().out
    assert meta(folder, "pretrain")["origin"] == tokens and steps(folder, "pretrain")[-1] == 8


def test_text_may_move_or_go(folder: Path) -> None:
    (folder / "text.jsonl").rename(folder / "elsewhere.jsonl")
    assert quern(folder, "pretrain", "--resume", "--data", str(folder / "elsewhere.jsonl"), "--train.steps", "7") == 0
    (folder / "elsewhere.jsonl").unlink()
    assert quern(folder, "pretrain", "--resume", "--train.steps", "8") == 0
    assert steps(folder, "pretrain")[-1] == 8
    assert main.main(["evaluate", *PLAIN, "--questions", "1", "--run", "app", "--out", str(folder / "out")]) == 0


def test_shards_that_are_gone_are_made_again_from_the_same_text_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = meta(folder, "pretrain")["origin"]["tokens"]
    shutil.rmtree(folder / "out" / "data")
    assert quern(folder, "pretrain", "--resume", "--train.steps", "7") == 0
    assert meta(folder, "pretrain")["origin"]["tokens"] == tokens
    shutil.rmtree(folder / "out" / "data")
    write_text(folder / "text.jsonl", seed=1)
    before = files(folder)
    assert quern(folder, "pretrain", "--resume", "--train.steps", "8") == 1
    assert "its token shards are gone" in capsys.readouterr().err
    assert files(folder) == before


def test_another_tokenizer_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "out" / "runs" / "app" / "tokenizer.json"
    own = meta(folder, "pretrain")["tokenizer"]
    write_text(folder / "other.jsonl", seed=5)
    assert quern(folder, "pretrain", *SHAPE, "--data", str(folder / "other.jsonl"), run="other") == 0
    sound = path.read_bytes()
    shutil.copy(folder / "out" / "runs" / "other" / "tokenizer.json", path)
    before = files(folder)
    capsys.readouterr()
    for verb, flags in (("pretrain", ["--resume"]), ("sft", ["--resume"]), ("chat", ["-p", "Hi"])):
        assert quern(folder, verb, *flags) == 1
        said = capsys.readouterr().err
        assert (
            f"the tokenizer has changed since run 'app' began with it ({own[:16]}, " in said
            and "restore it with `cp " in said
        )
        assert files(folder) == before
    path.write_bytes(sound)
    assert quern(folder, "pretrain", "--resume") == 0


def test_a_second_text_does_not_overwrite_the_tokenizer_of_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base model is gone, the fine-tuned one is not: pretraining again must not take its tokenizer away."""
    shutil.rmtree(folder / "out" / "runs" / "app" / "pretrain")
    write_text(folder / "other.jsonl", seed=5)
    before = files(folder)
    assert quern(folder, "pretrain", *SHAPE, "--data", str(folder / "other.jsonl")) == 1
    assert "holds a model (sft) of another tokenizer" in capsys.readouterr().err
    assert files(folder) == before


def test_conversations_that_changed_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, own = files(folder), meta(folder, "sft")["origin"]["conversations"]
    write_talks(folder / "talks.jsonl", seed=3)
    for verb in ("sft", "run"):
        assert quern(folder, verb, "--resume", "--sft.steps", "6") == 1
        said = capsys.readouterr().err
        assert "the conversations have changed since run 'app' began with it" in said and own[:16] in said
        assert "quern sft --from app --run NAME" in said
        assert files(folder) == before


def test_a_checkpoint_of_another_text_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """origin.json put there from another run of the same tokenizer: the checkpoints know better."""
    path = folder / "out" / "runs" / "app" / "pretrain" / "origin.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    write_text(folder / "more.jsonl", seed=2)
    assert quern(folder, "pretrain", "--from", "app", "--data", str(folder / "more.jsonl"), run="other") == 0
    other = json.loads((folder / "out/runs/other/pretrain/origin.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps(body | {name: other[name] for name in ("text", "tokens", "shards")}), encoding="utf-8")
    before = files(folder)
    assert quern(folder, "pretrain", "--resume", "--train.steps", "8") == 1
    assert "the text has changed since" in capsys.readouterr().err
    assert files(folder) == before


def test_a_run_with_damaged_checkpoints_does_not_begin_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (folder / "out/runs/app/pretrain/checkpoints").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    before = files(folder)
    assert quern(folder, "pretrain", "--resume") == 1
    assert "none of the checkpoints under" in capsys.readouterr().err
    assert files(folder) == before


def test_tokens_need_the_tokenizer_that_made_them_and_not_its_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, named = folder / "tokens", folder / "named.json"
    tokens.mkdir()
    for file in (folder / "out" / "data").glob("text-*/*.bin"):
        shutil.copy(file, tokens)
    shutil.copy(folder / "out/runs/app/tokenizer.json", named)
    shape = [flag for flag in SHAPE if flag not in ("--text.vocab-size", "330", "--text.tokenizer-megabytes", "0.1")]
    flags = [*shape, "--data", str(tokens), "--text.tokenizer", str(named)]
    assert quern(folder, "pretrain", *flags, run="bin") == 0
    write_text(folder / "other.jsonl", seed=5)
    assert quern(folder, "pretrain", *SHAPE, "--data", str(folder / "other.jsonl"), run="other") == 0
    shutil.copy(folder / "out/runs/other/tokenizer.json", named)
    before = files(folder, "bin")
    for begun in (["--resume"], ["--from", "bin"]):
        run = "bin" if begun == ["--resume"] else "next"
        assert quern(folder, "pretrain", *begun, "--train.steps", "8", run=run) == 1
        assert f"--text.tokenizer {named} is another tokenizer now" in capsys.readouterr().err
    assert files(folder, "bin") == before and not (folder / "out/runs/next").exists()
    named.unlink()
    assert quern(folder, "pretrain", "--resume", "--train.steps", "7", run="bin") == 0


def test_a_recipe_and_an_origin_that_are_lost_are_in_the_checkpoints(folder: Path) -> None:
    stage = folder / "out/runs/app/pretrain"
    names = ("recipe.json", "origin.json")
    before = {name: json.loads((stage / name).read_text(encoding="utf-8")) for name in names}
    for name in names:
        (stage / name).unlink()
    assert quern(folder, "pretrain", "--resume") == 0
    after = {name: json.loads((stage / name).read_text(encoding="utf-8")) for name in names}
    for body in (before, after):
        body["recipe.json"].pop("data")  # the fixture has rewritten the path
    assert before == after


def test_what_a_killed_first_save_left_is_no_model(folder: Path) -> None:
    (folder / "out/runs/new/pretrain/checkpoints/step-00000002.tmp-abcd").mkdir(parents=True)
    shutil.copy(folder / "out/runs/app/tokenizer.json", folder / "out/runs/new/tokenizer.json")
    write_text(folder / "other.jsonl", seed=5)
    assert quern(folder, "pretrain", *SHAPE, "--data", str(folder / "other.jsonl"), run="new") == 0


# What a resume needs, and what it may change --------------------------------------------------------------------


def test_a_resume_changes_what_it_names_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--resume", "--train.steps", "9", "--optim.lr-scale", "0.002", "--train.micro-batch-tokens", "64"]
    assert quern(folder, "pretrain", *flags) == 0
    said = capsys.readouterr().out
    for line in ("train.steps 6 → 9", "optim.lr-scale 0.0625 → 0.002", "train.micro-batch-tokens 128 → 64"):
        assert line in said
    stage = folder / "out" / "runs" / "app" / "pretrain"
    assert read_metrics(stage)[-1]["step"] == 9
    assert json.loads((stage / "recipe.json").read_text(encoding="utf-8"))["optim"]["lr_scale"] == 0.002
    changed = [event["changed"] for event in read_events(stage) if event["kind"] == "command"]
    assert len(changed) == 1 and "train.steps 6 → 9" in changed[0]


def test_what_would_make_it_another_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(folder)
    for flags, message in (
        ("--model.width 32", "model.width 16 → 32 would make it another run"),
        ("--seed 3", "seed 0 → 3 would make it another run"),
        ("--train.steps 3", "was pretrained for 6 steps, so train.steps 3 is behind it"),
        ("--train.minutes 9", "train.minutes unset → 9 would make it another run"),
    ):
        assert quern(folder, "pretrain", "--resume", *flags.split()) == 1
        assert message in capsys.readouterr().err
    assert files(folder) == before


def test_fine_tuning_goes_on_from_the_run_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quern(folder, "sft", "--resume", "--sft.steps", "6") == 0
    assert "sft.steps 4 → 6" in capsys.readouterr().out
    assert steps(folder, "sft")[-1] == 6
    assert quern(folder, "pretrain", "--resume", "--train.steps", "8") == 0
    assert quern(folder, "run", "--resume", "--sft.steps", "7", "--questions", "1") == 0
    assert "fine-tuning began with step 6 of the base model, which has 8 now" in capsys.readouterr().out


# Going on from a finished model ---------------------------------------------------------------------------------


def tensors(folder: Path, stage: str, step: int, run: str = "app") -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "out/runs" / run / stage / "checkpoints" / f"step-{step:08d}")[0]


def test_a_new_run_begins_with_the_finished_ones_weights_and_moments(folder: Path) -> None:
    write_text(folder / "more.jsonl", seed=2)
    flags = ["--from", "app", "--data", str(folder / "more.jsonl"), "--train.steps", "1", "--train.keep", "9"]
    before = files(folder)
    assert quern(folder, "pretrain", *flags, run="next") == 0
    assert files(folder) == before
    base, begun = tensors(folder, "pretrain", 6), tensors(folder, "pretrain", 0, "next")
    assert base.keys() == begun.keys() and all(torch.equal(base[name], begun[name]) for name in base)
    assert any(name.startswith("m.") and tensor.any() for name, tensor in begun.items())
    assert meta(folder, "pretrain", "next")["origin"]["base"] == {
        "run": "app",
        "stage": "pretrain",
        "step": 6,
        "tokens": meta(folder, "pretrain")["state"]["tokens"],
    }
    assert meta(folder, "pretrain", "next")["tokenizer"] == meta(folder, "pretrain")["tokenizer"]


def test_the_checkpoint_before_the_warmdown_is_kept_and_can_be_gone_on_from(folder: Path) -> None:
    """warmdown_share 0.65 of 6 steps: the rates fall from step 2 on. It stays where the run is lengthened."""
    assert steps(folder, "pretrain") == [2, 4, 6]
    flags = ["--from", "app", "--from-step", "before-warmdown", "--train.keep", "9"]
    assert quern(folder, "pretrain", *flags, run="flat") == 0
    base, begun = tensors(folder, "pretrain", 2), tensors(folder, "pretrain", 0, "flat")
    assert all(torch.equal(base[name], begun[name]) for name in base)
    recipe = json.loads((folder / "out/runs/flat/pretrain/recipe.json").read_text(encoding="utf-8"))
    assert recipe["train"]["warmup_steps"] == 0 and recipe["data_seed"] == 1
    assert quern(folder, "pretrain", "--resume", "--train.steps", "24") == 0
    assert steps(folder, "pretrain")[0] == 2 and len(steps(folder, "pretrain")) == 4
    assert quern(folder, "pretrain", *flags, "--train.steps", "1", run="later") == 0
    base, begun = tensors(folder, "pretrain", steps(folder, "pretrain")[-3]), tensors(folder, "pretrain", 0, "later")
    assert all(torch.equal(base[name], begun[name]) for name in base)


def test_from_begins_new_runs_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SHAPE, "--data", str(folder / "text.jsonl")]
    assert quern(folder, "pretrain", *flags, run="second") == 0
    before = files(folder, "second")
    assert quern(folder, "sft", "--from", "app", *SFT, run="second") == 1
    assert "run 'second' has a model of its own (pretrain): name a new run" in capsys.readouterr().err
    assert files(folder, "second") == before


def test_one_command_begins_a_run_and_goes_on_with_it(folder: Path) -> None:
    """As a job's script gives it again and again: --resume where there is nothing yet, with --from or without."""
    flags = [*SHAPE, "--data", str(folder / "text.jsonl"), "--resume"]
    for _ in range(2):
        assert quern(folder, "pretrain", "gpt", *flags, run="job") == 0
        events = [event["kind"] for event in read_events(folder / "out/runs/job/pretrain")]
        assert events.count("finish") == events.count("start") == 1 and "resume" not in events  # finished already
        assert quern(folder, "pretrain", "--from", "app", "--resume", run="next") == 0
        starts = [event["step"] for event in read_events(folder / "out/runs/next/pretrain") if "steps" in event]
        assert starts == [0]


def test_a_run_without_a_checkpoint_yet_keeps_its_facts_when_it_goes_on(folder: Path) -> None:
    """Killed before its first save: the facts of its text are in run.json, and not made again."""
    shutil.rmtree(folder / "out/runs/app/pretrain/checkpoints")
    before = json.loads((folder / "out/runs/app/run.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder / "out/runs/app/sft")
    assert quern(folder, "pretrain", "--resume") == 0
    assert json.loads((folder / "out/runs/app/run.json").read_text(encoding="utf-8")) == before


def test_a_model_is_fine_tuned_as_often_as_wanted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(folder)
    for name in ("one", "two"):
        assert quern(folder, "sft", "--from", "app", *SFT, run=name) == 0
        assert steps(folder, "sft", name)[-1] == 4
    assert files(folder) == before
    assert main.main(["evaluate", *PLAIN, "--questions", "1", "--run", "two", "--out", str(folder / "out")]) == 0
    assert quern(folder, "sft", "--from", "two", *SFT, run="two") == 1
    assert "--from two names the run itself" in capsys.readouterr().err
    assert quern(folder, "sft", "--from", "app", "--from-step", "5", *SFT, run="three") == 1
    assert "has no such checkpoint; there are newest and the steps 2, 4, 6" in capsys.readouterr().err
    assert not (folder / "out/runs/three").exists()


def test_what_stops_before_its_first_save_resumes_with_the_same_weights(folder: Path) -> None:
    flags = "--train.steps 2 --train.save-every 9 --train.warmdown-share 1".split()
    assert quern(folder, "pretrain", "--from", "app", *flags, run="next") == 0
    shutil.rmtree(folder / "out/runs/next/pretrain/checkpoints/step-00000002")
    assert steps(folder, "pretrain", "next") == [0]
    shutil.rmtree(folder / "out/runs/app")
    stage = folder / "out/runs/next/pretrain"
    expected = [line["loss"] for line in read_metrics(stage) if "loss" in line]
    assert quern(folder, "pretrain", "--resume", run="next") == 0
    assert expected == [line["loss"] for line in read_metrics(stage) if "loss" in line]


# The whole way --------------------------------------------------------------------------------------------------


def test_who_trains_is_said_of_a_run_that_has_checkpoints_already(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb, flags in (("pretrain", SHAPE), ("sft", SFT)):
        with run_lock(RunDir(folder / "out", "app"), "quern run --run app"):
            assert quern(folder, verb, *flags) == 1
        said = capsys.readouterr().err
        assert f"in use by process {os.getpid()} on " in said and "(`quern run --run app`)" in said, said
        assert quern(folder, verb, *flags) == 1 and "already: continue with --resume" in capsys.readouterr().err


def test_run_goes_on_from_the_weights_that_another_run_gave(folder: Path) -> None:
    """Killed before its first save of its own: it has step 0 alone."""
    assert quern(folder, "pretrain", "--from", "app", "--train.keep", "9", run="next") == 0
    for step in steps(folder, "pretrain", "next")[1:]:
        shutil.rmtree(manifest.path_of(folder / "out/runs/next/pretrain/checkpoints", step))
    assert steps(folder, "pretrain", "next") == [0]
    assert quern(folder, "run", "--resume", "--no-sft", "--questions", "1", run="next") == 0
    assert steps(folder, "pretrain", "next")[-1] == 6


def test_a_text_of_ones_own_makes_a_base_model_that_continues_what_was_held_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*SHAPE, "--data", str(folder / "text.jsonl")]
    assert quern(folder, "run", *flags, run="plain") == 0
    said, run = capsys.readouterr().out, folder / "out/runs/plain"
    assert "fine-tun" not in said and "tinyworld/" not in said and not (run / "sft").exists()
    assert "your text: " in said and "to expect, if it is English prose: about " in said
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [one["prompt"] for one in samples if one["stage"] == "pretrain"]
    val = Corpus.open(folder / "out" / read_origin(run / "pretrain").shards, "val")  # type: ignore[union-attr]
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    held_out = [tokenizer.decode(val.gather(number).tolist()) for number in range(val.num_documents)]
    assert len(prompts) == 5 and all(any(prompt in text for text in held_out) for prompt in prompts)
    assert all(f"  {prompt}{GOES_ON}" in said for prompt in prompts)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "What more text or time would bring" in page and "Pretraining: continuations" in page


def test_a_run_that_was_stopped_goes_on_by_the_command_it_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = folder / "out/runs/halted/pretrain/metrics.jsonl"

    def interrupt() -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt, daemon=True)
    waiting.start()
    talks = ["--text.tinyworld-conversations", "60", *SFT[:4], "--questions", "1", "--chat"]
    flags = [*SHAPE, "--data", str(folder / "text.jsonl"), *talks, "--train.steps", "3000", "--train.log-every", "1"]
    assert quern(folder, "run", *flags, run="halted") == EXIT_STOPPED
    said = capsys.readouterr().out
    command = shlex.split(re.findall(r"as asked, and saved: continue with `(.*)`", said)[0])
    own = ["--run", "halted", "--out", str(folder / "out")]
    assert command == ["quern", "run", "--resume", *own, "--questions", "1", "--chat", *PLAIN]
    assert steps(folder, "pretrain", "halted")


def test_before_training_it_says_what_it_will_do(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quern.stages.session.CLEARLY_WORSE", 0.0)
    flags = [*SHAPE, "--data", str(folder / "text.jsonl"), "--train.steps", "76", "--train.eval-every", "1000"]
    flags += ["--train.batch-tokens", "1024"]
    shutil.rmtree(folder / "out/runs/app")
    assert quern(folder, "pretrain", *flags) == 0
    said = capsys.readouterr().out
    tokens = int(said.split("parameters; text: ")[1].split(" tokens")[0].replace(",", ""))
    epochs = 76 * 1024 / tokens
    assert "warning: the validation loss was lowest at step 76 (" in said
    most = 2 * READINGS  # of so small a text
    assert epochs > most and f"length: 77,824 tokens, {epochs:.2g} epochs of the text" in said
    assert f"warning: the text is read {epochs:.2g} times" in said
    assert f"--train.steps {int(most * tokens / 1024)}" in said
    assert "of steps, by this machine's speed" in said and "memory: at most" in said
