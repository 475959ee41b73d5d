"""Refuses to start what cannot be cut into shards or cannot fit in memory, with what to set instead; before any text
is prepared, and again if depth or batch is fitted to the text.

What a rank will need is worked out from the recipe (memory.py), and is right to within a tenth; only what does
not fit even a tenth below it is refused. A GPU has its own memory, CPU ranks share their machine's.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quern.estimate.layout import lay_out
from quern.estimate.memory import Memory, memory
from quern.machine import Machine
from quern.mesh import Mesh
from quern.model.count import parameters, weightless
from quern.parallel.plan import shard_model
from quern.process import number_of
from quern.recipe import Recipe, Resolved
from quern.resolve import resolve
from quern.terminal import human_size

ERROR = 0.1  # the largest error of the prediction, as a share of it
PLENTY = 4  # the exact need is counted where its upper bound is more than this part of the room
INTERPRETER_BYTES = 5e8
"""Python, torch and the compiler, of each rank on a CPU; on a GPU, its context and NCCL take more than that."""
MORE_RANKS = (2, 4, 8, 16, 32, 64, 128, 256)


def machine_memory() -> float:
    """Bytes of this machine, or what its container may have."""
    size = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):  # "max" is no limit
        size = min(size, float(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return size


def room_of_a_rank(machine: Machine, mesh: Mesh) -> float:
    """Bytes that a rank may take for training."""
    if machine.device.type == "cuda":
        return torch.cuda.get_device_properties(machine.device).total_memory - INTERPRETER_BYTES
    return machine_memory() / number_of("LOCAL_WORLD_SIZE", mesh.world.size) - INTERPRETER_BYTES


def memory_check(
    recipe: Recipe, machine: Machine, mesh: Mesh, log: Callable[[str], None], room: float | None = None
) -> tuple[float, float] | None:
    """Refuses what cannot fit in memory.

    Args:
        recipe: The recipe, not resolved.
        machine: The machine that computes.
        mesh: The ranks.
        log: Takes lines for the user.
        room: Bytes that a rank may take; None finds out.

    Returns:
        Bytes that a rank needs, or at most needs where there is plenty of room, and bytes that it may take; None where
        the need is not known beforehand.

    Raises:
        ValueError: It cannot fit; the message holds the numbers and a setting that fits. Or its model cannot be cut.
    """
    room = room_of_a_rank(machine, mesh) if room is None else room
    resolved = resolve(recipe, mesh.dp)
    try:
        if mesh.tp > 1:
            shard_model(weightless(resolved), mesh)
        if (most := _at_most(resolved)) <= room / PLENTY:
            return most, room
        needed = _needed(resolved, machine, mesh.dp, mesh.tp, mesh.zero)
    except RuntimeError as error:  # a model may do what cannot be done without numbers; it trains all the same
        log(f"memory is not checked beforehand: {str(error).splitlines()[0]}")
        return None
    if needed.peak * (1 - ERROR) <= room:
        return needed.peak, room
    where = "a GPU has" if machine.device.type == "cuda" else "a rank may have of this machine's memory"
    kinds = ("parameters", "gradients", "masters", "moments", "activations")
    parts = ", ".join(f"{human_size(getattr(needed, kind))} {kind}" for kind in kinds)
    raise ValueError(
        f"this cannot fit: a rank needs {human_size(needed.peak)} ({parts}, {human_size(needed.loss)} for the loss), "
        f"and {human_size(room)} are what {where}: "
        f"{_remedy(recipe, machine, mesh, room)}"
    )


def _at_most(resolved: Resolved) -> float:
    """Bytes that no rank exceeds. Counting them exactly (`memory`) imports PyTorch's compiler, which takes a second."""
    shape, tokens = resolved.model, resolved.train.micro_batch_tokens
    a_layer = 60 * shape.width + 4 * (shape.mlp_width or 0) + 4 * shape.heads * shape.context
    return 40.0 * parameters(resolved).total + 4.0 * tokens * (shape.depth * a_layer + 6 * shape.vocab_size)


def _needed(resolved: Resolved, machine: Machine, dp: int, tp: int, zero: int) -> Memory:
    return memory(lay_out(resolved, machine.dtype, dp, tp, zero), machine.device.type, machine.compile)


def _cut(recipe: Recipe, mesh: Mesh) -> bool:
    """Whether the shards can share the model."""
    try:
        return mesh.tp == 1 or bool(shard_model(weightless(resolve(recipe, mesh.dp)), mesh))
    except ValueError:
        return False


def _remedy(recipe: Recipe, machine: Machine, mesh: Mesh, room: float) -> str:
    """The first that helps: smaller micro-batches, blocks that run again, ZeRO-3, more GPUs, a smaller model."""

    def fits(other: Recipe, dp: int = mesh.dp, zero: int = mesh.zero) -> bool:
        made = resolve(other, dp)
        least = 2 * machine.dtype.itemsize * parameters(made).total / mesh.tp / (dp if zero == 3 else 1)
        if least > room:  # the parameters and their gradients: to count the rest takes seconds for many layers
            return False
        return _needed(made, machine, dp, mesh.tp, zero).peak * (1 + ERROR) <= room

    def with_train(other: Recipe, **fields: Any) -> Recipe:
        return replace(other, train=replace(other.train, **fields))

    resolved, gpu, depth = resolve(recipe, mesh.dp), machine.device.type == "cuda", recipe.depth
    context, tokens = resolved.model.context, resolved.train.micro_batch_tokens
    while tokens > context:
        tokens = max(context, tokens // 2)
        if fits(with_train(recipe, micro_batch_tokens=tokens)):
            return f"set --train.micro-batch-tokens {tokens}"
    smallest, least = with_train(recipe, micro_batch_tokens=context), f"--train.micro-batch-tokens {context}"
    counts = range(recipe.train.recompute, depth + 1)
    enough = bisect_left(counts, True, key=lambda blocks: fits(with_train(smallest, recompute=blocks)))
    if enough < len(counts):
        return f"set {least} --train.recompute {counts[enough]}"
    if mesh.dp > 1 and mesh.zero == 2 and fits(with_train(smallest, recompute=depth), zero=3):
        return f"set --zero 3 {least} --train.recompute {depth}"
    if gpu and fits(with_train(smallest, recompute=depth, optimizer_memory="cpu")):
        return f"set --train.optimizer-memory cpu {least} --train.recompute {depth}"
    rows = max(1, resolved.train.batch_tokens // context)
    for times in MORE_RANKS if gpu else ():  # CPU ranks would share the same memory
        if mesh.dp * times <= rows and fits(smallest, dp=mesh.dp * times):
            more = f"--ranks {mesh.world.size * times}"
            return f"train on more GPUs, {more} {least} (quern lab plan says which way)"
    # Micro-batches of one row; some architectures pair their layers.
    step = 2 if depth % 2 == 0 else 1
    depths = [replace(recipe, depth=each) for each in range(step, depth, step)]
    smaller = [with_train(one, micro_batch_tokens=resolve(one).model.context) for one in depths if _cut(one, mesh)]
    if fitting := bisect_left(smaller, True, key=lambda one: not fits(one)):
        found = smaller[fitting - 1]
        return f"set --depth {found.depth} --train.micro-batch-tokens {found.train.micro_batch_tokens}"
    return "no depth fits: set a smaller --model.context, --text.vocab-size or --model.width"
