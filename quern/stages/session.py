"""What every stage begins with: the measured peak, the run's facts, the plan of a training stage, its trackers."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quern.data.batch import Batches
from quern.machine import Machine
from quern.mesh import FOR_MAIN, Mesh, PeersLostError
from quern.model.count import flops_per_token, kv_bytes_per_token, parameters
from quern.model.fp8 import use_fp8
from quern.recipe import Recipe
from quern.records import Nowhere, Records, StageFolder, git_hash
from quern.runs.origin import FILE, Origin
from quern.runs.run_dir import RunDir
from quern.temporaries import write_whole
from quern.terminal import Meter
from quern.train import loop
from quern.train.state import TrainState

POLL_SECONDS = 0.1


def describe_run(recipe: Recipe, machine: Machine, run_dir: RunDir, facts: dict[str, Any], command: str) -> None:
    """Writes run.json: how the run was started, on what, with what."""
    run_dir.write(
        "run.json",
        {
            "command": command,
            "git": git_hash(Path(__file__).parent),
            "machine": machine.describe(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "model": {
                "parameters": vars(parameters(recipe)),
                "flops_per_token": flops_per_token(recipe),
                "kv_bytes_per_token": kv_bytes_per_token(recipe, machine.dtype),
            },
            **facts,
        },
    )


def lower_precision(recipe: Recipe, model: Any, log: Callable[[str], None]) -> dict[str, Any]:
    """Makes the model train in FP8 if the recipe says so → what to record of it. Call it before compilation."""
    if recipe.train.fp8 == "off":
        return {}
    report = use_fp8(model, head_only=recipe.train.fp8 == "head")
    log(str(report))
    return {"fp8": report.to_json()}


def show_training(meter: Meter) -> Callable[[TrainState, dict[str, Any]], None]:
    """A progress function for the loop."""

    def advance(state: TrainState, line: dict[str, Any]) -> None:
        speed = f", {line['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in line else ""
        meter.at(state.step, f"loss {round(line['loss'], 3) + 0.0:.3f}{speed}")  # + 0.0: no -0.000

    return advance


def train_with_meter(
    label: str,
    state: TrainState,
    batches: Batches,
    plan: loop.TrainingPlan,
    machine: Machine,
    folder: Records,
    mesh: Mesh,
) -> int:
    """The loop, with its progress shown by rank 0 → an exit code."""
    with Meter(label, plan.steps, "steps", silent=not mesh.main) as meter:
        return loop.train(state, batches, plan, machine, folder, meter.log, show_training(meter))


@contextmanager
def open_folder(
    path: Path,
    recipe: Recipe,
    source: str | None,
    trackers: tuple = (),
    mesh: Mesh | None = None,
    origin: Origin | None = None,
) -> Iterator[Records]:
    """The stage's records, with its recipe and origin written; rank 0 alone writes."""
    if mesh is not None and not mesh.main:
        yield Nowhere(path)
        return
    with StageFolder(path, trackers) as folder:
        if origin is not None:
            write_whole(path / FILE, json.dumps(origin.to_json(), indent=2) + "\n")
        folder.write_recipe(recipe.to_json(), source)
        yield folder


@contextmanager
def main_first(mesh: Mesh) -> Iterator[None]:
    """Runs the body on rank 0 first, then on the other ranks, which find what rank 0 has written.

    The body may take hours. So the other ranks poll the store without a time limit, instead of waiting in a collective;
    train/heartbeat.py ends them when rank 0 is gone. Every rank passes here equally often.

    Raises:
        PeersLostError: on the other ranks, without running the body, when the body raised on rank 0.
    """
    if mesh.world.size == 1:
        yield
        return
    with mesh.progress.during(FOR_MAIN), mesh.progress.blocked("a wait for rank 0"):
        key = f"main first/{mesh.store.add(f'main first/rank {mesh.rank}', 1)}"
        while not mesh.main and not mesh.store.check([key]):
            time.sleep(POLL_SECONDS)
        if not mesh.main and mesh.store.get(key) != b"done":
            raise PeersLostError("rank 0 failed")
    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        if mesh.main:
            mesh.store.set(key, outcome)
