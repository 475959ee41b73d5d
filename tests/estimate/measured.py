"""Ranks run this to measure the memory of a training step: the most that a process held, less what it held before."""

import ctypes
import gc
from dataclasses import replace

import numpy as np
import torch

from quern import compiler
from quern.data.batch import Batch
from quern.machine import DTYPES, Machine
from quern.mesh import Mesh
from quern.model.base import recompute
from quern.optim.schedule import Multipliers
from quern.parallel.plan import shard_model
from quern.process import peak_resident, reset_peak_resident, resident
from quern.recipe import ModelRecipe, Resolved, TrainRecipe
from quern.resolve import resolve
from quern.train.state import build_model, build_state, compile_model
from quern.train.step import train_step
from tests.support.models import RECIPES


def recipe(
    architecture: str, rows: int, micro_rows: int, depth: int = 4, vocabulary: int = 4096, recomputed: int = 0
) -> Resolved:
    shape = ModelRecipe(width=128, head_dim=64, context=256, vocab_size=vocabulary, bos=0, windows="L")
    train = TrainRecipe(steps=4, batch_tokens=256 * rows, micro_batch_tokens=256 * micro_rows, recompute=recomputed)
    return resolve(replace(RECIPES[architecture], depth=depth, model=shape, train=train))


def peak(mesh: Mesh, architecture: str, dtype: str, compiled: bool = False, **sizes: int) -> int:
    """Bytes that two steps take beside what the process, its libraries and a step of a tiny model had taken."""
    compiler.set_eager(not compiled)
    torch.backends.mkldnn.set_flags(False)  # its scratch memory differs between processors
    return_freed_memory()
    machine = Machine(torch.device("cpu"), DTYPES[dtype], compiled, 1)
    tiny = recipe(architecture, 2 * mesh.dp, 1, depth=2, vocabulary=512, recomputed=min(2, sizes["recomputed"]))
    _steps(tiny, machine, mesh)
    gc.collect()
    before = resident()
    assert reset_peak_resident() and before
    _steps(recipe(architecture, **sizes), machine, mesh)
    return peak_resident() - before


def return_freed_memory() -> None:
    """Every block from 64 KiB on is mapped and unmapped by itself, so that what a process holds is what it uses."""
    libc = ctypes.CDLL("libc.so.6")
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    assert libc.mallopt(M_MMAP_THRESHOLD, 2**16) and libc.mallopt(M_TRIM_THRESHOLD, 2**16)


def _steps(made: Resolved, machine: Machine, mesh: Mesh) -> None:
    model = shard_model(build_model(made, machine, 0), mesh)
    compile_model(model, machine)
    recompute(model, made.train.recompute)
    state = build_state(made, machine, model, mesh)
    assert made.train.batch_tokens and made.model.context and made.model.vocab_size
    rows = made.train.batch_tokens // made.model.context // mesh.dp
    numbers = np.random.default_rng(mesh.data.rank)
    for _ in range(2):
        tokens, targets = numbers.integers(1, made.model.vocab_size, (2, rows, made.model.context), dtype=np.int32)
        batch = Batch(tokens, targets, targets > 0)
        train_step(state, batch, Multipliers(), machine, micro_batch_rows=made.micro_batch_rows)
