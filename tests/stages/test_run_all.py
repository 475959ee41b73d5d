"""The whole way in seconds: `quern run` on a toy world, going on where it stopped, and what it leaves behind."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.recipes.gpt import RECIPE
from quern.records import read_events, read_metrics
from quern.runs.run_dir import RunDir
from quern.stages import run_all
from quern.stages.session import Session
from quern.train import manifest
from quern.train.horizon import recorded_plans
from tests.support.command import Told
from tests.support.command import run as run_command
from tests.support.rows import write_rows
from tests.support.toy_training import CPU

PLAIN = "--no-compile --dtype fp32 --threads 1".split()
PRETRAIN = f"""--depth 1 --text.vocab-size 400 --text.tinyworld-megabytes 0.1 --text.tokenizer-megabytes 0.1
 --text.val-megabytes 0.01 --model.width 32 --model.head-dim 16 --model.context 128 --train.batch-tokens 512
 --train.steps 8 --train.log-every 2 --train.save-every 4 {" ".join(PLAIN)}""".split()
SFT = "--text.tinyworld-conversations 100 --sft.steps 6 --sft.batch-tokens 512".split()
STAGES = ("pretrain", "sft")
TOY = [*PRETRAIN, *SFT, "--questions", "2"]
OWN = """
from dataclasses import replace
from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASE

class Own(GPT):
    pass

RECIPE = replace(BASE, name="own", make_model=Own)
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy run, whole."""
    folder = tmp_path_factory.mktemp("whole")
    run_command("run", *TOY, "--run", "toy", "--out", folder)
    return folder


def test_every_stage_left_its_records_and_the_report_stands_alone(out: Path) -> None:
    run = out / "runs" / "toy"
    for stage, steps in (("pretrain", 8), ("sft", 6)):
        events = [event["kind"] for event in read_events(run / stage)]
        assert events[-1] == "finish" and "save" in events
        assert manifest.steps(run / stage / "checkpoints")[-1] == steps
        lines = read_metrics(run / stage)
        assert lines[-1]["step"] == steps and "val_loss" in lines[-1]
        assert all(0 < line["loss"] < 10 for line in lines if "loss" in line)
        assert (run / stage / "recipe.json").exists()
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert facts["command"].startswith("quern run --depth 1") and facts["machine"]["dtype"] == "float32"
    assert facts["model"]["parameters"]["total"] > 0 and facts["data"]["source"] == "tinyworld"
    scores = [json.loads(line) for line in (run / "evaluate.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {"facts", "sums"} <= {score["task"].split("/")[-1] for score in scores}
    assert (run / "samples.jsonl").stat().st_size > 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<html" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert 'src="http' not in page and 'href="http' not in page
    assert "quern run --depth 1" in (run / "report.md").read_text(encoding="utf-8")
    assert {path.name for path in out.iterdir()} <= {"runs", "tokenizers", "data"}


def test_fine_tuning_after_a_text_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    session = Session(stage="pretrain", machine=CPU, run_dir=RunDir(tmp_path / "out", "a"), named={"sft.steps", "sft"})
    asks = r"^--sft.steps asks for .*, and a text of your own gets it with --chat or --c"
    with pytest.raises(ValueError, match=asks):
        run_all.run(replace(RECIPE, data="a.txt"), session, questions=1)
    assert not list(tmp_path.iterdir())


def test_run_again_goes_on_where_it_was_and_trains_nothing_twice(out: Path, told: Told) -> None:
    def left() -> list[Any]:
        trained = [(read_metrics(run / stage), manifest.steps(run / stage / "checkpoints")) for stage in STAGES]
        return [*trained, (run / "evaluate.jsonl").read_text(encoding="utf-8")]

    run = out / "runs" / "toy"
    before = left()
    said = told("run", *TOY[:-2], "--run", "toy", "--out", out)
    assert "pretraining: finished already, after 8 steps" in said and "fine-tuning: finished already" in said
    assert "evaluated already: `quern evaluate --run toy" in said and "resumed" not in said and "evaluating" not in said
    assert left() == before and "quern │" in said


def test_a_base_model_that_trained_on_since_is_named(out: Path, tmp_path: Path, told: Told) -> None:
    where = ["--resume", "--run", "toy", "--out", str(shutil.copytree(out, tmp_path / "out"))]
    told("pretrain", *where, *PLAIN, "--train.steps", 9)
    warned = "warning: fine-tuning began with step 8 of pretrain, which has step 9 now: fine-tune again under another"
    assert warned in told("sft", *where, *PLAIN) and manifest.steps(out / "runs/toy/pretrain/checkpoints")[-1] == 8


def test_a_few_conversations_are_given_the_epochs_to_learn_in(out: Path, told: Told) -> None:
    where = ["--run", "few", "--out", out]
    told("pretrain", *where, *PRETRAIN)
    where += PLAIN
    said = told("sft", *where, "--text.tinyworld-conversations", "20", "--sft.batch-tokens", "512")
    epochs = re.findall(r"fine-tuning has \d+ steps, too few .* --sft.epochs (\d+), which makes at least 50", said)
    assert "too few" not in told("sft", "--resume", *where, "--sft.epochs", *epochs)
    assert manifest.steps(out / "runs/few/sft/checkpoints")[-1] in range(50, 60)


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        (300, "", "2 conversations, 2 of them without a reply in the context of 128 tokens, none to hold out"),
        (1, "--sft.batch-tokens 100", "sft.batch-tokens must be a multiple of model.context"),
    ],
)
def test_what_fine_tuning_would_refuse_is_refused_before_pretraining(
    out: Path, tmp_path: Path, told: Told, words: int, flags: str, message: str
) -> None:
    rows = [{"instruction": f"{number} {'letter ' * words}", "output": "Yes."} for number in range(2)]
    own = ["--conversations", write_rows(tmp_path / "talks.jsonl", rows)]
    command = ["run", *PRETRAIN, *own, *flags.split(), "--run", "refused", "--out", out]
    assert message in told(*command, code=1) and not (out / "runs/refused/pretrain/metrics.jsonl").exists()


def test_a_recipe_of_ones_own_is_trained_and_resumed(out: Path, tmp_path: Path, told: Told) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    where = ["--run", "own", "--out", out]
    told("pretrain", path, *PRETRAIN, *where)
    stage = out / "runs" / "own" / "pretrain"
    assert (stage / "recipe_source.py").read_text(encoding="utf-8") == OWN
    assert json.loads((stage / "recipe.json").read_text(encoding="utf-8"))["make_model"] == "own:Own"
    told("pretrain", path, *PRETRAIN, *where, "--resume")
    told("pretrain", *where, *PLAIN, "--resume", "--train.steps", "9")
    assert manifest.steps(stage / "checkpoints")[-1] == 9


# A budget of time -----------------------------------------------------------------------------------------------------


ARGUMENTS = """pretrain --text.tinyworld-megabytes 0.05 --text.val-megabytes 0.01 --text.vocab-size 320 --depth 1
 --model.width 16 --model.head-dim 16 --model.context 32 --no-compile --dtype fp32 --threads 1 --train.minutes 0.01
 --train.save-every 7 --train.warmup-steps 0 --optim.lr-scale 0.01 --run timed""".split()


def test_minutes_become_steps_and_what_died_before_its_first_checkpoint_keeps_them(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quern.process.SILENT_SECONDS", 0.0)
    run_command(*ARGUMENTS, "--out", tmp_path)
    said = "".join(capsys.readouterr())
    assert "waiting for a few steps on trial, " in said and said.count("waiting for the first step, ") == 1
    folder = tmp_path / "runs" / "timed" / "pretrain"
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    train = recipe["train"]
    assert train["steps"] > 1 and train["batch_tokens"] == 4096
    assert (train["save_every"], train["warmup_steps"], recipe["optim"]["lr_scale"]) == (7, 0, 0.01)
    assert train["eval_every"] == -(-train["steps"] // 8)
    text = json.loads((folder.parent / "run.json").read_text(encoding="utf-8"))["data"]["train"]["tokens"]
    readings = train["steps"] * train["batch_tokens"] / text
    expected = max(1, recipe["optim"]["decay_scale"] * min(1, (readings - 1) / 4))
    assert recipe["optim"]["table_decay_scale"] == pytest.approx(expected)
    # A restart resumes with nothing saved yet: measured anew, the steps would be others, and refused.
    before = (folder / "recipe.json").read_text(encoding="utf-8")
    shutil.rmtree(folder / "checkpoints")
    told(*ARGUMENTS, "--out", tmp_path, "--resume")
    assert (folder / "recipe.json").read_text(encoding="utf-8") == before


def test_a_restart_keeps_what_was_fitted_to_a_text_of_ones_own(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of several ranks repeats the command as it was, whether or not a checkpoint was saved."""
    (tmp_path / "own.txt").write_text("".join(f"The {n}th miller grinds corn.\n\n" for n in range(3000)), "utf-8")
    shape = "--model.width 16 --model.head-dim 16 --model.context 32 --depth 1 --train.steps 2 --run own".split()
    command = ["pretrain", "--data", tmp_path / "own.txt", *shape, *PLAIN, "--out", tmp_path]
    told(*command)
    folder = tmp_path / "runs" / "own" / "pretrain"
    before = (folder / "recipe.json").read_text(encoding="utf-8")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for path in (folder / "none", folder / "checkpoints"):
        shutil.rmtree(path, ignore_errors=path.name == "none")
        told(*command)
        assert (folder / "recipe.json").read_text(encoding="utf-8") == before


def test_minutes_may_change_while_the_run_has_some_left(tmp_path: Path, told: Told) -> None:
    many, plain = ["--train.batch-tokens", "256", "--train.keep", "99"], ["--no-compile", "--dtype", "fp32"]
    told(*ARGUMENTS, *many, "--train.minutes", "0.005", "--out", tmp_path)
    folder = tmp_path / "runs" / "timed" / "pretrain"
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["train"]["batch_tokens"] == 256, "the batch that was asked for"
    resume = ["pretrain", "--resume", "--run", "timed", "--out", tmp_path, *plain, "--train.minutes", "0.015"]
    spent = "has spent its minutes and ended: train on from its model with `quern pretrain --from"
    assert spent in told(*resume, code=1)
    saved = sorted((folder / "checkpoints").iterdir())
    for path in saved[len(saved) // 2 :]:
        shutil.rmtree(path)
    said = told(*resume)
    assert "train.minutes 0.005 → 0.015" in said and "time: about 1 s of steps" in said
    end = [line for line in read_metrics(folder) if "seconds" in line][-1]
    assert end["seconds"] > 0.6 and end["step"] == recorded_plans(folder)[-1][1]
    finish = read_events(folder)[-1]
    assert (finish["kind"], finish["step"]) == ("finish", end["step"])
    told("pretrain", "--from", "timed", "--run", "next", "--out", tmp_path, *plain)
    assert read_metrics(folder.parents[1] / "next" / "pretrain")[-1]["step"] == end["step"], "as long as it was"
