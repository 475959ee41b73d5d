"""Refuses to start what cannot be cut into shards or cannot fit in memory, with what to set instead; before any text
is prepared, and again if depth or batch is fitted to the text.

What a rank will need is worked out from the recipe (memory.py), and is right to within a tenth; only what does
not fit even a tenth below it is refused. A GPU has its own memory, CPU ranks share their machine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from quern.estimate.layout import lay_out
from quern.estimate.memory import Memory, memory
from quern.machine import Machine
from quern.mesh import Mesh
from quern.model.count import parameters, weightless
from quern.parallel.plan import shard_model
from quern.process import environment
from quern.recipe import Recipe, Resolved
from quern.resolve import resolve
from quern.terminal import human_size

ERROR = 0.1
"""The largest error of the prediction, as a share of it."""
PLENTY = 4
"""The exact need is counted where its upper bound is more than this part of the room."""
INTERPRETER_BYTES = 5e8
"""Python, torch and the compiler, of each rank on a CPU; on a GPU, its context and NCCL take more than that."""


def machine_memory() -> float:
    """Bytes of this machine, or what its container may have; infinite where the system does not say."""
    sizes = [float("inf")]
    for path in ("/sys/fs/cgroup/memory.max", "/proc/meminfo"):
        try:
            words = Path(path).read_text(encoding="utf-8").split()
        except OSError:
            continue
        if words[0] == "MemTotal:":
            sizes.append(float(words[1]) * 1024)
        elif words[0].isdigit():
            sizes.append(float(words[0]))
    return min(sizes)


def room_of_a_rank(machine: Machine, mesh: Mesh) -> float:
    """Bytes that a rank may take for training."""
    if machine.device.type == "cuda":
        return torch.cuda.get_device_properties(machine.device).total_memory - INTERPRETER_BYTES
    here = int(environment().get("LOCAL_WORLD_SIZE", mesh.world.size))
    return machine_memory() / here - INTERPRETER_BYTES


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
        ValueError: It cannot fit; the message holds the numbers, and settings that fit, if there are any. Or its model
            cannot be cut.
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


def _remedy(recipe: Recipe, machine: Machine, mesh: Mesh, room: float) -> str:
    """The settings that help: each row of the list comes on top of those before it, or in the place of its flag's."""
    gpu, train, zero, settings = machine.device.type == "cuda", recipe.train, mesh.zero, dict[str, int | str]()
    resolved = resolve(recipe, mesh.dp)
    context, held = resolved.model.context, resolved.micro_batch_rows
    halves = [context * (held >> power) for power in range(1, held.bit_length())] or [context]
    rows: list[tuple[str, int | str, bool]] = [
        *(("train.micro-batch-tokens", size, True) for size in halves),
        ("train.recompute", recipe.depth, True),
        ("zero", 3, mesh.dp > 1),
        ("train.optimizer-memory", "cpu", gpu),
    ]
    for flag, value, possible in rows:
        if not possible:
            continue
        settings[flag] = value
        if flag == "zero":
            zero = 3
        else:
            train = replace(train, **{flag.removeprefix("train.").replace("-", "_"): value})
        needed = _needed(resolve(replace(recipe, train=train), mesh.dp), machine, mesh.dp, mesh.tp, zero)
        if needed.peak * (1 + ERROR) <= room:
            return "set" + "".join(f" --{flag} {value}" for flag, value in settings.items())
    return f"set a smaller --depth{', or use more GPUs (quern lab plan)' if gpu else ''}"
