"""What part of a logical parameter this process holds under tensor parallelism.

A parameter that tensor parallelism cut carries a `Sharding` as its attribute `sharding`; one without it is held whole
by every shard of the replica, and its gradient is the whole one after backward. The optimizer and the checkpoints read
this and nothing else of how a model was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

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
