"""One of two processes that share a mesh: trains a few steps, prints losses and a hash of what it can see.

python -m tests.grug.two_processes COORDINATOR ID FOLDER
"""

import json
import sys
from pathlib import Path

import jax

from quern.grug import checkpoint
from quern.grug.bridge import from_torch, to_torch
from quern.grug.mesh import anywhere, join_processes, make_mesh, same_everywhere
from quern.grug.model import Params
from quern.grug.state import TrainState, device_batch, init_state, state_of, step_config, train_step
from tests.grug.parity import batch_of, recipe_of, weights_of
from tests.train.toy import ROWS, toy_schedule, toy_state


def main(coordinator: str, process: int, folder: Path) -> None:
    join_processes(coordinator, 2, process)
    recipe = recipe_of(1)
    cfg, mesh = step_config(recipe, "float32"), make_mesh(data=2, model=2)
    assert len(jax.local_devices()) == 2 and jax.process_count() == 2
    losses = []
    with jax.set_mesh(mesh), checkpoint.Saver(folder, keep=2) as saver:
        params = from_torch(weights_of(toy_state(recipe)), cfg.model, mesh)
        state = state_of(params, jax.random.key(0), cfg)
        for step in range(3):
            batch = device_batch(batch_of("weighted", step), ROWS, mesh)
            state, metrics = train_step(state, batch, toy_schedule(12)(step), cfg)
            losses.append(float(metrics["loss"]))
            saver.save(step, state, {"step": step})
        saver.wait()
        found = {
            "losses": losses,
            "named alike": same_everywhere(f"name-{process}"),
            "one raised": anywhere(process == 1),
            "none raised": anywhere(False),
        }
    print(json.dumps(found), flush=True)


def expected(folder: str) -> dict[str, object]:
    """The same steps in one process on one device, and whether its state is what the two saved."""
    from tests.grug.parity import deviation, mesh_of, state_on

    recipe, mesh = recipe_of(1), mesh_of("one")
    cfg, losses = step_config(recipe, "float32"), []
    with jax.set_mesh(mesh):
        state = state_on(weights_of(toy_state(recipe)), cfg, mesh)
        for step in range(3):
            batch = device_batch(batch_of("weighted", step), ROWS, mesh)
            state, metrics = train_step(state, batch, toy_schedule(12)(step), cfg)
            losses.append(float(metrics["loss"]))
        newest = checkpoint.latest(Path(folder), print)
        assert newest is not None and newest[1]["step"] == 2
        saved: TrainState = checkpoint.load(newest[0], jax.eval_shape(lambda: init_state(0, cfg)), mesh)
        params: Params = saved.params
        return {"losses": losses, "weights": deviation(to_torch(params), to_torch(state.params))}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
