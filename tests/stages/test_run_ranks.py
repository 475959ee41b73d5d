"""`quern run` on two ranks over gloo, from nothing: models, scores and report of one process; and after a fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from quern.records import read_metrics
from quern.train import manifest
from tests.parallel.test_faults import lines_with
from tests.stages.test_run_all import TOY
from tests.support.faulty_ranks import FaultyRanks

PRETRAIN_STEPS, SFT_STEPS = 8, 6
CALM = ("--optim.lr-scale", "0.015625")
"""Rates at which the order of the ranks' sums changes the scores by less than the bar."""
ALIKE = 1e-4
"""Relative, of losses after up to 14 updates. The laws bound an update by 1e-5; AdamW normalises gradients that are
near zero, so rounding errors can grow from one update to the next. Other batches change the last losses by 6e-3."""
RECIPE = """
from dataclasses import replace
from quern.recipes.gpt import RECIPE as BASELINE
from quern.stages import sft

def planted(*arguments, **options):
    raise ValueError("planted")

sft.ready_model = planted
RECIPE = replace(BASELINE, name="planted")
"""


def request(folder: Path, name: str, *arguments: str, **how: Any) -> dict[str, Any]:
    command = ["run", *arguments, *TOY, *CALM, "--run", name, "--out", str(folder / name)]
    return {"arguments": command, "faults": [], "ranks": 2, "restarts": 0, "counted": False} | how


@pytest.fixture(scope="module")
def cold(faulty_server: FaultyRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the runs of one process, of two replicas and of two shards, and what the two replicas said."""
    folder = tmp_path_factory.mktemp("cold")
    alone, replicas = request(folder, "alone", ranks=1), request(folder, "replicas", counted=True)
    found = faulty_server.together([alone, replicas, request(folder, "shards", "--tp", "2")])
    for one in found:
        assert one["exits"] in ([[0]], [[0, 0]]) and one["result"] == 0, one["said"]
    return folder, found[1]


def scores(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / name / "runs" / name / "evaluate.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["replicas", "shards"])
def test_two_ranks_leave_what_one_process_leaves(cold: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, _ = cold
    runs = [folder / each / "runs" / each for each in ("alone", name)]
    files = [{str(p.relative_to(run)) for p in run.rglob("*") if p.suffix != ".safetensors"} for run in runs]
    assert files[0] == files[1]
    assert files[0] >= {"report.html", "report.md", "evaluate.jsonl", "answers/sft/tinyworld/sums.answers.jsonl"}
    for stage, steps in (("pretrain", PRETRAIN_STEPS), ("sft", SFT_STEPS)):
        one, two = ({line["step"]: line for line in read_metrics(run / stage)} for run in runs)
        assert one.keys() == two.keys() and max(one) == steps
        for step in one:
            for field in {"loss", "val_loss"} & one[step].keys():
                assert two[step][field] == pytest.approx(one[step][field], rel=ALIKE)
    for theirs, ours in zip(scores(folder, "alone"), scores(folder, name), strict=True):
        assert ours["value"] == pytest.approx(theirs["value"], rel=ALIKE)
        assert ours | {"value": 0} == theirs | {"value": 0}
    assert titles(runs[0]) == titles(runs[1])


def test_each_step_is_said_once_and_taken_by_both(cold: tuple[Path, dict[str, Any]]) -> None:
    _, replicas = cold
    for line, times in {"tokens: train": 1, "fine-tuned on": 1, "evaluating: sft": 1, "report: ": 2}.items():
        assert len(lines_with(line, replicas["said"])) == times, replicas["said"]
    assert [len(replicas["events"][rank]["begins"]) for rank in "01"] == [PRETRAIN_STEPS + SFT_STEPS] * 2


def titles(run: Path) -> list[str]:
    text = (run / "report.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("## ")]


def test_shards_practise_as_one_process(cold: tuple[Path, dict[str, Any]], faulty_server: FaultyRanks) -> None:
    """Reinforcement learning of the same model: the replies, and what is learned of them."""
    out = cold[0] / "alone"
    stage = f"rl --from alone --out {out} --rl.rewards counting --rl.kl 0.1 --rl.steps 2 --rl.groups 3 --rl.samples 3"
    sizes = "--rl.max-tokens 6 --rl.val-questions 2 --rl.val-samples 2 --no-compile --dtype fp32 --threads 1"
    runs = {"practised": (), "practised-in-shards": ("--tp", "2")}
    found = faulty_server.together(
        [
            {"arguments": [*stage.split(), *sizes.split(), "--run", run, *flags], "faults": [], "restarts": 0}
            | {"ranks": 2 if flags else 1, "counted": False}
            for run, flags in runs.items()
        ]
    )
    assert [one["result"] for one in found] == [0, 0], [one["said"] for one in found]
    one, two = (read_metrics(out / "runs" / run / "rl") for run in runs)
    for theirs, ours in zip(one, two, strict=True):
        for field in {"loss", "entropy", "reply_tokens", "val_kl"} & theirs.keys():
            assert ours[field] == pytest.approx(theirs[field], rel=ALIKE, abs=1e-6)


def test_a_rank_dies_while_fine_tuning_or_preparation_fails(
    cold: tuple[Path, dict[str, Any]], faulty_server: FaultyRanks
) -> None:
    """The killed run goes on within fine-tuning, and ends as the undisturbed one. An error of the user ends all ranks,
    also after the steps of pretraining."""
    folder, replicas = cold
    recipe = folder / "planted.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    begins = replicas["events"]["1"]["begins"][PRETRAIN_STEPS + 4]
    fault = {"kind": "kill", "rank": 1, "part": "train", "number": begins + 1}
    killed, refused = faulty_server.together(
        [
            request(folder, "killed", faults=[fault], restarts=1),
            request(folder, "refused", str(recipe), restarts=1),
        ]
    )
    assert killed["places"] and killed["exits"][1:] == [[0, 0]] and killed["result"] == 0, killed["said"]
    assert len(lines_with("resumed at step", killed["said"])) == 1, killed["said"]
    assert lines_with("pretraining: finished already", killed["said"]), killed["said"]
    assert scores(folder, "killed") == scores(folder, "replicas")
    assert refused["exits"] == [[0, 0]] and refused["result"] == 1, refused["said"]
    assert lines_with("quern run:", refused["said"]) == ["quern run: planted"]
    assert manifest.steps(folder / "refused/runs/refused/pretrain/checkpoints")[-1] == PRETRAIN_STEPS
