"""The part of a logical tensor that a process holds, of parameters under tensor parallelism or of a checkpoint.

A parameter that tensor parallelism cut has a `Sharding` as its attribute `sharding`; every shard of the replica holds
the others whole. The optimizer and the checkpoints need no other information about how a model was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Sharding:
    """Along `dim`, this process holds indices offset … offset + size - 1 of `whole`; the rest is padding."""

    dim: int
    offset: int
    size: int
    whole: int


def sharding_of(parameter: Parameter) -> Sharding | None:
    return getattr(parameter, "sharding", None)


@dataclass(frozen=True)
class Slice:
    """A rectangle of a logical tensor.

    Attributes:
        tensor: The rectangle, not a copy.
        offsets: Where the rectangle begins in the logical tensor.
        whole: Shape of the logical tensor.
        saved: Whether this rank writes it; one rank writes equal copies.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    saved: bool = True

    def of(self, logical: Tensor) -> Tensor:
        """Returns a view of this slice's part of a whole logical tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            logical = logical.narrow(dim, offset, size)
        return logical


def sliced(tensor: Tensor, sharding: Sharding | None, first_row: int, rows: int, *, saved: bool) -> Slice | None:
    """Describes `tensor`, rows first_row … of a parameter's local part, as a slice; None for padding."""
    offsets, whole = [0] * tensor.ndim, list(tensor.shape)
    offsets[0], whole[0] = first_row, rows
    if sharding is not None:
        tensor = tensor.narrow(sharding.dim, 0, _held(tensor, sharding, first_row))
        offsets[sharding.dim] += sharding.offset
        whole[sharding.dim] = sharding.whole
    return Slice(tensor, tuple(offsets), tuple(whole), saved) if tensor.numel() else None


def _held(tensor: Tensor, sharding: Sharding, first_row: int) -> int:
    """Counts the indices along the cut dimension that are not padding."""
    begin = first_row if sharding.dim == 0 else 0
    return max(0, min(tensor.size(sharding.dim), sharding.size - begin))
