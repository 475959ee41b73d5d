"""Law: masters and moments that visit for the update = ones that stay, bit for bit, on one process and on replicas.

On a CPU the two memories are one; the copies are made all the same. No GPU has run it.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quern import compiler
from quern.machine import DTYPES
from quern.mesh import Mesh
from quern.train import checkpoint, manifest
from quern.train.state import TrainState, build_model, build_state
from tests.laws.table import Law
from tests.parallel.compared import advance, recipe, small_cuts
from tests.support.ranks import Ranks
from tests.support.toy_training import CPU, differing, snapshot, toy_loader


def state_of(dtype: str, memory: str, mesh: Mesh | None = None) -> TrainState:
    made, machine = recipe(), replace(CPU, dtype=DTYPES[dtype])
    made = replace(made, train=replace(made.train, optimizer_memory=memory))
    return build_state(made, machine, build_model(made, machine, 0), mesh)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_process(dtype: str, law: Law) -> None:
    states = [state_of(dtype, memory) for memory in ("device", "cpu")]
    for step in range(4):
        for state in states:
            advance(state, toy_loader().batch(step), step, 3, 0.5)
    found = differing(snapshot(states[0]), snapshot(states[1]))
    law(f"masters and moments that visit = that stay, {dtype}", found, unit="bit for bit")


def saved(mesh: Mesh, memory: str, target: str) -> None:
    compiler.set_eager(True)
    small_cuts()
    state = state_of("bf16", memory, mesh)
    for step in range(3):
        advance(state, toy_loader().batch(step, mesh.data.rank, mesh.data.size), step, 2, None)
    checkpoint.save(Path(target), 3, state.optimizer.slices(), {"state": state.meta()}, keep=1, mesh=mesh)


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas(zero: int, ranks: Ranks, tmp_path: Path) -> None:
    for memory in ("device", "cpu"):
        function = "tests.laws.test_optimizer_memory_law:saved"
        ranks(2, function, zero=zero, memory=memory, target=str(tmp_path / memory))
    stays, visits = (checkpoint.load(manifest.path_of(tmp_path / name, 3))[0] for name in ("device", "cpu"))
    assert stays.keys() == visits.keys()
    assert all(torch.equal(stays[name], visits[name]) for name in stays)
