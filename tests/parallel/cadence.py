"""What ranks run for the law of groups that are updated on every second step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.adamw_every_second import rules
from quern.mesh import Mesh, alone
from quern.parallel.plan import shard_model
from quern.recipe import OptimRecipe
from quern.train import checkpoint, manifest
from quern.train.state import TrainState, build_model, build_state
from tests.parallel.compared import Snapshot, advance, apart, begin, recipe, state_apart
from tests.support.deviation import deviation
from tests.support.models import moved
from tests.support.toy_training import CPU, toy_loader

STEPS, SAVED = 6, 3
"""The checkpoint is written between the two steps of an update."""


def every_second(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Trains on the mesh and on one process; saves after step 3, resumes on the mesh and on one process.

    Returns the deviations, the names that a resume changes, and the bytes that this rank sent in each step.
    """
    begin()
    reference = cadence_state(alone())
    state = cadence_state(mesh)
    path, sent, worst = Path(folder) / str(mesh.world.size), [], 0.0
    for step in range(STEPS):
        expected = step_of(reference, alone(), step)
        before = sum(mesh.traffic().values())
        found = step_of(state, mesh, step)
        sent.append(sum(mesh.traffic().values()) - before)
        worst = max(worst, apart(found.loss, expected.loss), apart(found.grad_norm, expected.grad_norm))
        if step % 2:
            worst = max(worst, state_apart(state, Snapshot.of(reference)))
        if step + 1 == SAVED:
            checkpoint.save(path, SAVED, state.slices(), {"state": state.meta()}, keep=1, mesh=mesh)
    resumed, alone_resumed = resume(mesh, path), resume(alone(), path)
    slices = state.slices()
    differing = [n for n, part in resumed.slices().items() if not torch.equal(part.tensor, slices[n].tensor)]
    ours, theirs = (list(one.tensors().values()) for one in (alone_resumed, reference))
    return {"worst": worst, "differing": differing, "reshaped": deviation(ours, theirs), "sent": sent}


def resume(mesh: Mesh, path: Path) -> TrainState:
    tensors, meta = checkpoint.load(manifest.path_of(path, SAVED))
    assert any(name.startswith("held.") for name in tensors)
    state = cadence_state(mesh)
    state.restore(tensors, meta["state"])
    for step in range(SAVED, STEPS):
        step_of(state, mesh, step)
    return state


def cadence_state(mesh: Mesh) -> TrainState:
    asked = recipe()
    optim = OptimRecipe(lr_scale=0.01, decay_scale=0.1, width_scale=1.0, eps=1e-4)  # as in `compared.optimized_shards`
    asked = replace(asked, make_rules=rules, optim=optim, model=replace(asked.model, kv_heads=2))
    return build_state(asked, CPU, shard_model(moved(build_model(asked, CPU, 0)), mesh), mesh)


def step_of(state: TrainState, mesh: Mesh, step: int) -> Any:
    return advance(state, toy_loader().batch(step, mesh.data.rank, mesh.data.size), step, 3, 0.5)
