"""The part of a bucket's state that a rank holds, as slices of logical tensors, which checkpoints write and read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quern.parallel.buckets import Bucket
from quern.parallel.ownership import Stack
from quern.parallel.sharding import Slice, sharding_of, sliced


def slices_of(bucket: Bucket) -> dict[str, Slice]:
    """This rank's slices of masters and state, by logical name. Held gradients are in "held.<parameter>", with one
    entry per replica along the first dim, and their number in "held_steps.<parameter>"."""
    found = {} if bucket.held is None else _held_slices(bucket, bucket.held)
    for kind, buffer in {"master": bucket.masters, **bucket.state}.items():
        parts = _row_slices(bucket, buffer) if bucket.stack is None else _stack_slices(bucket, bucket.stack, buffer)
        found |= {f"{kind}.{name}": part for name, part in parts}
    return found


def _held_slices(bucket: Bucket, held: Tensor) -> dict[str, Slice]:
    """Each replica's own sum, so that a resumed run adds the same numbers in the same order."""
    data, found = bucket.mesh.data, {}
    for (name, parameter), view in zip(bucket.parameters, bucket.param_views, strict=True):
        own = held.as_strided(view.shape, view.stride(), view.storage_offset())
        saved = not bucket.replicated or bucket.mesh.model.rank == 0
        part = sliced(own, sharding_of(parameter), 0, len(own), saved=saved)
        found[f"held_steps.{name}"] = Slice(torch.tensor([bucket.held_steps]), (0,), (1,), bucket.mesh.main)
        if part is not None:
            offsets, whole = (data.rank, *part.offsets), (data.size, *part.whole)
            found[f"held.{name}"] = replace(part, tensor=part.tensor[None], offsets=offsets, whole=whole)
    return found


def _stack_slices(bucket: Bucket, stack: Stack, buffer: Tensor) -> list[tuple[str, Slice]]:
    """Whole parameters; each is one matrix or several."""
    parts = buffer.view(len(stack.units), *stack.shape[:-2], *buffer.shape[1:])
    saved = bucket.exchange or bucket.mesh.model.rank == 0
    return [
        (bucket.parameters[unit][0], Slice(part, (0,) * part.ndim, tuple(part.shape), saved))
        for unit, part in zip(stack.units, parts, strict=True)
    ]


def _row_slices(bucket: Bucket, buffer: Tensor) -> list[tuple[str, Slice]]:
    """The rows of each parameter that are in the region."""
    found = []
    saved = (not bucket.small or bucket.mesh.data.rank == 0) and (not bucket.replicated or bucket.mesh.model.rank == 0)
    for (name, parameter), view in zip(bucket.parameters, bucket.param_views, strict=True):
        start = view.storage_offset() - bucket.params.storage_offset()
        width = parameter.shape[1:].numel()
        rows = parameter.numel() // width
        low = max(0, -(-(bucket.begin - start) // width))
        high = min(rows, (bucket.end - start) // width)
        if low >= high:
            continue
        at = start + low * width - bucket.begin
        part = buffer[at : at + (high - low) * width].view(high - low, *parameter.shape[1:])
        if (whole := sliced(part, sharding_of(parameter), low, rows, saved=saved)) is not None:
            found.append((name, whole))
    return found
