"""`--train.minutes`: the steps follow from the measured speed, and what was asked for stays as it was asked."""

import json
import shutil
from pathlib import Path

import pytest

from quern.cli import main
from quern.records import read_events, read_metrics
from quern.train.horizon import recorded_plans

ARGUMENTS = """pretrain --text.tinyworld-megabytes 0.05 --text.val-megabytes 0.01 --text.vocab-size 320 --depth 1
 --model.width 16 --model.head-dim 16 --model.context 32 --no-compile --dtype fp32 --threads 1 --train.minutes 0.01
 --train.save-every 7 --train.warmup-steps 0 --optim.lr-scale 0.01 --run timed""".split()


def test_minutes_become_steps_and_what_died_before_its_first_checkpoint_keeps_them(tmp_path: Path) -> None:
    assert main.main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
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
    assert main.main([*ARGUMENTS, "--out", str(tmp_path), "--resume"]) == 0
    assert (folder / "recipe.json").read_text(encoding="utf-8") == before


def test_minutes_may_change_while_the_run_has_some_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many, plain = ["--train.batch-tokens", "256", "--train.keep", "99"], ["--no-compile", "--dtype", "fp32"]
    assert main.main([*ARGUMENTS, *many, "--out", str(tmp_path)]) == 0
    folder = tmp_path / "runs" / "timed" / "pretrain"
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["train"]["batch_tokens"] == 256, "the batch that was asked for"
    resume = ["pretrain", "--resume", "--run", "timed", "--out", str(tmp_path), *plain]
    assert main.main([*resume, "--train.minutes", "0.03"]) == 1
    assert (
        "has spent its minutes and ended: train on from its model with `quern pretrain --from"
        in capsys.readouterr().err
    )
    saved = sorted((folder / "checkpoints").iterdir())
    for path in saved[len(saved) // 2 :]:
        shutil.rmtree(path)
    assert main.main([*resume, "--train.minutes", "0.03"]) == 0, capsys.readouterr().err
    assert "train.minutes 0.01 → 0.03" in capsys.readouterr().out
    end = [line for line in read_metrics(folder) if "seconds" in line][-1]
    assert end["seconds"] > 1.2 and end["step"] == recorded_plans(folder)[-1][1]
    finish = read_events(folder)[-1]
    assert (finish["kind"], finish["step"]) == ("finish", end["step"])
    assert main.main(["pretrain", "--from", "timed", "--run", "next", "--out", str(tmp_path), *plain]) == 0
    assert read_metrics(folder.parents[1] / "next" / "pretrain")[-1]["step"] == end["step"], "as long as it was"
