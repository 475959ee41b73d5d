"""Metrics in the files of TensorBoard and Weights & Biases, both real and offline, read back without quern."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.records import StageFolder, TensorBoardTracker, find_trackers, read_metrics
from tests.stages.test_run_all import STAGES, TOY
from tests.support.faulty_ranks import FaultyRanks

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
pytest.importorskip("wandb", reason="needs wandb")
proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
Numbers = dict[tuple[str, int], float]
OFFLINE = """
import os
from quern.recipes.gpt import RECIPE

os.environ |= {{"WANDB_MODE": "offline", "HOME": {home!r}}}  # wandb keeps its own logs in the home folder
"""
BLOCK, HEADER = 32_768, 7


@pytest.fixture(scope="module")
def run(faulty_server: FaultyRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole way, on two ranks."""
    folder = tmp_path_factory.mktemp("tracked")
    recipe = folder / "offline.py"
    recipe.write_text(OFFLINE.format(home=str(folder)), encoding="utf-8")
    flags = ["--questions", "1", "--track", "tensorboard", "wandb", "--run", "r", "--out", str(folder / "out")]
    found = faulty_server(["run", str(recipe), *TOY[:-2], *flags])
    assert found["exits"] == [[0, 0]] and found["result"] == 0, found["said"]
    return folder / "out/runs/r"


def of_quern(stage: Path) -> Numbers:
    lines = read_metrics(stage)
    return {(name, line["step"]): value for line in lines for name, value in line.items() if name != "step"}


def of_tensorboard(stage: Path) -> list[tuple[tuple[str, int], float]]:
    read = events.EventAccumulator(str(stage / "tensorboard"), size_guidance={events.SCALARS: 0}).Reload()
    return [((tag, one.step), one.value) for tag in read.Tags()["scalars"] for one in read.Scalars(tag)]


def of_wandb(stage: Path) -> tuple[Numbers, list[Any]]:
    """The history in the file of a wandb run, and the runs' own records."""
    (path,) = stage.glob("wandb/offline-run-*/*.wandb")
    found: Numbers = {}
    runs = []
    for body in records_of(path.read_bytes()):
        record = proto.Record.FromString(body)
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        found |= {(name, int(items["_step"])): float(value) for name, value in items.items() if name[0] != "_"}
        runs += [record.run] if record.HasField("run") else []
    return found, runs


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: blocks of chunks with checksum, length and type (1 whole, 2 to 4 parts)."""
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield parts
            parts = b""


@pytest.mark.parametrize("stage", STAGES)
def test_both_have_every_number_of_a_stage(run: Path, stage: str) -> None:
    numbers = of_quern(run / stage)
    assert {("loss", 6), ("val_loss", 6)} <= numbers.keys()
    assert dict(of_tensorboard(run / stage)) == {key: pytest.approx(value, rel=1e-6) for key, value in numbers.items()}
    found, (begun,) = of_wandb(run / stage)
    assert found == numbers
    assert (begun.project, begun.run_group, begun.job_type) == ("quern", "r", stage)
    assert begun.run_id == (run / stage / "wandb/id").read_text(encoding="utf-8")


def test_the_lines_of_a_resumed_stage_are_there_once(tmp_path: Path) -> None:
    """The stage dies after step 6, and goes on from its checkpoint of step 3."""
    lost, kept = 1.0, 2.0
    for first, last, loss in ((1, 6, lost), (4, 8, kept)):
        trackers = [make(tmp_path, {}) for make in find_trackers(["tensorboard"])]
        assert isinstance(trackers[0], TensorBoardTracker)
        with StageFolder(tmp_path, trackers) as folder:
            folder.rewind(first - 1)
            for step in range(first, last + 1):
                folder.metric(step=step, loss=loss)
    found = of_tensorboard(tmp_path)
    assert found == [(("loss", step), lost if step < 4 else kept) for step in range(1, 9)]
    assert dict(found) == of_quern(tmp_path)
