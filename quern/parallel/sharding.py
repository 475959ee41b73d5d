"""Which part of a logical tensor a process holds: of parameters under tensor parallelism, of state on its way to disk.

A parameter that tensor parallelism cut carries a `Sharding` as its attribute `sharding`; one without it is held whole
by every shard of the replica, and its gradient is the whole one after backward. The optimizer and the checkpoints read
this and nothing else of how a model was cut.

A `Slice` is a rectangle of a logical tensor. It tells torch.distributed.checkpoint's planner what to write (the method
with double underscores is that protocol): every rank writes its rectangles, and any number of ranks reads the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.nn import Parameter


@dataclass(frozen=True)
class Sharding:
    """Along dimension `dim` this process holds indices offset … offset + size - 1 of `whole` logical ones.

    The local tensor may be longer than `size` along `dim`: the rest is padding, whose gradient is zero.
    """

    dim: int
    offset: int
    size: int
    whole: int


def sharding_of(parameter: Parameter) -> Sharding | None:
    return getattr(parameter, "sharding", None)


@dataclass(frozen=True)
class Slice:
    """tensor: the rectangle that begins at `offsets` of a logical tensor of shape `whole`, live memory.

    saved: whether this rank writes it; of equal copies one rank does.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    saved: bool = True

    def of(self, logical: Tensor) -> Tensor:
        """This slice's part of a whole logical tensor, a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            logical = logical.narrow(dim, offset, size)
        return logical

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        chunk = ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.tensor.shape)
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.whole))
        return [WriteItem(MetadataIndex(name, torch.Size(self.offsets)), WriteItemType.SHARD, tensor_data=data)]


def sliced(tensor: Tensor, sharding: Sharding | None, first_row: int, rows: int, *, saved: bool) -> Slice | None:
    """The slice that `tensor` is: rows first_row … of a parameter's local part, itself cut as `sharding` says.

    None where nothing but padding is left of it.
    """
    offsets, whole = [0] * tensor.ndim, list(tensor.shape)
    offsets[0], whole[0] = first_row, rows
    if sharding is not None:
        tensor = tensor.narrow(sharding.dim, 0, _held(tensor, sharding, first_row))
        offsets[sharding.dim] += sharding.offset
        whole[sharding.dim] = sharding.whole
    return Slice(tensor, tuple(offsets), tuple(whole), saved) if tensor.numel() else None


def _held(tensor: Tensor, sharding: Sharding, first_row: int) -> int:
    """How many indices along the cut dimension are no padding."""
    begin = first_row if sharding.dim == 0 else 0
    return max(0, min(tensor.size(sharding.dim), sharding.size - begin))
