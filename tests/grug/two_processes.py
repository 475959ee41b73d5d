"""One of two processes that share a mesh: trains a few steps, saves, and prints its results.

python -m tests.grug.two_processes COORDINATOR ID FOLDER
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quern.data.batch import Batch
from quern.grug.gauntlet import moved
from quern.grug.mesh import first_process_first, gather, join_processes, make_mesh
from quern.grug.state import JaxTrainState, StepConfig, device_batch, init_state, state_of, step_config, train_step
from quern.recipe import ModelRecipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.stages.jax.backend import JaxBackend, JaxRun, arrays_of, known, processes
from quern.stages.jax.train import to_torch
from quern.train import checkpoint, manifest
from quern.train.guard import Guard

ROWS = 8


def config() -> StepConfig:
    shape = ModelRecipe(width=32, heads=4, kv_heads=2, head_dim=8, vocab_size=62, context=16)
    train = TrainRecipe(steps=12, batch_tokens=ROWS * 16)
    return step_config(resolve(replace(RECIPE, depth=1, model=shape, train=train)), "float32")


def steps(mesh: Mesh, cfg: StepConfig, folder: Path | None) -> tuple[JaxTrainState, list[float]]:
    """Returns the state after one step, which is saved, and the losses of two steps.

    The weights are perturbed, as in the laws: initially some gradients are nearly singular, and Muon amplifies
    rounding.
    """
    state, losses, rng = init_state(0, cfg), [], np.random.default_rng(0)
    state = state_of(jax.jit(partial(jax.tree.map, moved))(state.params), cfg)
    schedule, first = RECIPE.make_schedule(TrainRecipe(steps=12, warmup_steps=2, warmdown_share=0.65)), state
    for step in range(2):
        tokens = rng.integers(0, 62, (ROWS, 17), dtype=np.int32)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], rng.random((ROWS, 16)) < 0.5)
        state, metrics = train_step(state, device_batch(batch, ROWS, mesh), schedule(step), cfg)
        losses.append(float(metrics["loss"]))
        if step == 0:
            first = jax.tree.map(jnp.copy, state)
            if folder is not None:
                save(folder, 1, state, cfg, mesh, {"step": 1})
    return first, losses


def save(folder: Path, step: int, state: JaxTrainState, cfg: StepConfig, mesh: Mesh, meta: dict[str, Any]) -> None:
    backend = JaxBackend(JaxRun(state, cfg, mesh, guard=Guard(0)), processes())
    checkpoint.save(folder, step, backend.save(), meta, 2, backend.mesh)


def main(coordinator: str, process: int, folder: Path) -> None:
    join_processes(coordinator, 2, process)
    cfg, mesh = config(), make_mesh(data=2, model=2)
    assert len(jax.local_devices()) == 2 and jax.process_count() == 2
    refusal = ""
    try:
        with first_process_first():
            if process == 0:
                raise FileNotFoundError("process 0 found no text")
            refusal = "the body ran on process 1"
    except (FileNotFoundError, ValueError) as error:
        refusal = str(error)
    with jax.set_mesh(mesh):
        _, losses = steps(mesh, cfg, folder)
        found = {
            "losses": losses,
            "named alike": gather(f"name-{process}")[0],
            "one raised": any(gather(process == 1)),
            "none raised": any(gather(False)),
            "refusal": refusal,
        }
    print(json.dumps(found), flush=True)


def expected(folder: str) -> dict[str, Any]:
    """The same steps in one process on one device, and the deviation of its weights from the saved ones."""
    cfg, mesh = config(), make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        state, losses = steps(mesh, cfg, None)
        newest = manifest.latest(Path(folder), print)
        assert newest is not None
        tensors = checkpoint.load(newest[0])[0] | {"rng": np.zeros(2, np.uint32)}  # as earlier versions saved it
        saved: JaxTrainState = arrays_of(known(tensors), state, mesh)
    ours, theirs = to_torch(state.params), to_torch(saved.params)
    gaps = [np.linalg.norm(theirs[name] - value) / np.linalg.norm(value) for name, value in ours.items()]
    return {"losses": losses, "weights": float(max(gaps)), "step": newest[1]["step"]}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
