"""`quern run` on two ranks over gloo, from nothing: models, scores and report of one process; and after a fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from quern.records import read_metrics
from quern.train import checkpoint
from tests.parallel.test_faults import lines_with
from tests.stages.test_run_all import TOY
from tests.support.faulty_ranks import FaultyRanks

PRETRAIN_STEPS, SFT_STEPS = 8, 6
RECIPE = """
from dataclasses import replace
from quern.recipes.gpt import RECIPE as BASELINE
from quern.stages import sft

def planted(*arguments):
    raise ValueError("planted")

sft.prepare_mixture = planted
RECIPE = replace(BASELINE, name="planted")
"""


def request(folder: Path, name: str, *recipe: str, **how: Any) -> dict[str, Any]:
    arguments = ["run", *recipe, *TOY, "--run", name, "--out", str(folder / name)]
    return {"arguments": arguments, "faults": [], "ranks": 2, "restarts": 0, "counted": False} | how


@pytest.fixture(scope="module")
def cold(faulty_server: FaultyRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the run of one process and that of two ranks, and what the ranks said."""
    folder = tmp_path_factory.mktemp("cold")
    one, two = faulty_server.together([request(folder, "one", ranks=1), request(folder, "two", counted=True)])
    assert one["exits"] == [[0]] and one["result"] == 0, one["said"]
    assert two["exits"] == [[0, 0]] and two["result"] == 0, two["said"]
    return folder, two


def scores(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / name / "runs" / name / "evaluate.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_two_ranks_leave_what_one_process_leaves(cold: tuple[Path, dict[str, Any]]) -> None:
    folder, two = cold
    runs = [folder / name / "runs" / name for name in ("one", "two")]
    files = [{str(p.relative_to(run)) for p in run.rglob("*") if p.suffix != ".safetensors"} for run in runs]
    assert files[0] == files[1]
    assert files[0] >= {"report.html", "report.md", "evaluate.jsonl", "answers/sft/tinyworld/sums.answers.jsonl"}
    for stage, steps in (("pretrain", PRETRAIN_STEPS), ("sft", SFT_STEPS)):
        ours, theirs = ({line["step"]: line for line in read_metrics(run / stage)} for run in runs)
        assert ours.keys() == theirs.keys() and max(ours) == steps
        for step in ours:
            for name in {"loss", "val_loss"} & ours[step].keys():
                assert theirs[step][name] == pytest.approx(ours[step][name], rel=1e-5)
    for one, own in zip(scores(folder, "one"), scores(folder, "two"), strict=True):
        assert one["value"] == pytest.approx(own["value"], rel=1e-5)
        assert one | {"value": 0} == own | {"value": 0}
    assert titles(runs[0]) == titles(runs[1])
    for line, times in {"tokens: train": 1, "fine-tuned on": 1, "evaluating: sft": 1, "report: ": 2}.items():
        assert len(lines_with(line, two["said"])) == times, two["said"]
    assert min(len(two["events"][rank]["begins"]) for rank in "01") == PRETRAIN_STEPS + SFT_STEPS


def titles(run: Path) -> list[str]:
    text = (run / "report.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("## ")]


def test_a_rank_dies_while_fine_tuning_or_preparation_fails(
    cold: tuple[Path, dict[str, Any]], faulty_server: FaultyRanks
) -> None:
    """The killed run goes on within fine-tuning, and ends as the undisturbed one. An error of the user ends all ranks,
    also after the steps of pretraining."""
    folder, two = cold
    recipe = folder / "planted.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    begins = two["events"]["1"]["begins"][PRETRAIN_STEPS + 4]
    fault = {"kind": "kill", "rank": 1, "part": "train", "number": begins + 1}
    killed, refused = faulty_server.together(
        [
            request(folder, "killed", faults=[fault], restarts=1),
            request(folder, "refused", str(recipe), restarts=1),
        ]
    )
    assert killed["places"] and killed["exits"][1:] == [[0, 0]] and killed["result"] == 0, killed["said"]
    assert len(lines_with("resumed at step", killed["said"])) == 2, killed["said"]
    assert scores(folder, "killed") == [
        line | {"run": "killed"} if "run" in line else line for line in scores(folder, "two")
    ]
    assert refused["exits"] == [[0, 0]] and refused["result"] == 1, refused["said"]
    assert lines_with("quern run:", refused["said"]) == ["quern run: planted"]
    assert checkpoint.steps(folder / "refused/runs/refused/pretrain/checkpoints")[-1] == PRETRAIN_STEPS
