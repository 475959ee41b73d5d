"""The tensors that a rank of a mesh would hold, computed without its memory and without the other ranks.

The code of training makes the sharded model and the optimizer's buckets, but on torch's "meta" device, which keeps
shapes and no numbers, and with groups that send nothing. So sizes are as in training, padding included. predict.py
and memory.py count what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from quern.mesh import Mesh, Pending, ProcessGroup, alone
from quern.model.count import weightless
from quern.optim.groups import make_groups
from quern.parallel.buckets import Bucket, Settings, make_buckets
from quern.parallel.plan import shard_model
from quern.parallel.zero3 import Part, numbers_of, parts_of
from quern.recipe import Resolved

Count = TypeVar("Count")


class Unconnected(ProcessGroup):
    """A group whose collectives move nothing: its tensors have no data."""

    def start(self, *args: Any, **options: Any) -> Pending:
        return Pending(None, self)


def unconnected(dp: int, tp: int, zero: int = 2) -> Mesh:
    """The mesh from the view of rank 0."""
    data, model, world = (Unconnected(name, n, 0) for name, n in (("data", dp), ("model", tp), ("world", dp * tp)))
    return replace(alone(), dp=dp, tp=tp, data=data, model=model, world=world, zero=zero)


@dataclass(frozen=True)
class Layout:
    """recipe: resolved; whole: the model; shard: rank 0's part of it, in the dtype of training, on "meta"; buckets: of
    its optimizer; parts: the modules whose parameters replicas share, if they do (zero3.py); known: the results of
    `once`, also of layouts that differ in their micro-batches and in the blocks that run again (`replace`)."""

    recipe: Resolved
    dp: int
    tp: int
    whole: Any
    shard: Any
    buckets: Sequence[Bucket]
    parts: Sequence[Part] = ()
    known: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Hashable, count: Callable[[], Count]) -> Count:
        """Returns what `count` returned at the first call with this key."""
        if key not in self.known:
            self.known[key] = count()
        return self.known[key]

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.embedding.weight.dtype

    @property
    def rows(self) -> int:
        """Rows of one replica in one step; the largest share where they do not divide evenly."""
        context, batch_tokens = self.recipe.model.context, self.recipe.train.batch_tokens
        return -(-max(1, batch_tokens // context) // self.dp)

    @property
    def micro_batches(self) -> list[int]:
        """The rows of each forward pass of a step."""
        most = self.recipe.micro_batch_rows
        return [min(most, self.rows - first) for first in range(0, self.rows, most)]


def lay_out(recipe: Resolved, dtype: torch.dtype, dp: int, tp: int, zero: int = 2) -> Layout:
    """Lays out a resolved recipe. Raises ValueError where the model cannot be sharded so, or a replica would have no
    rows."""
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    rows = max(1, batch_tokens // context)
    if dp > rows:
        instead = "raise --train.batch-tokens, or use fewer --gpus"
        raise ValueError(f"a batch of {rows:,} rows cannot feed {dp:,} replicas: {instead}")
    mesh = unconnected(dp, tp, zero)
    whole = weightless(recipe, dtype)
    shard = shard_model(weightless(recipe, dtype), mesh)
    groups = make_groups(shard.parameter_groups(), recipe.make_rules(recipe), shard.named_parameters())
    parts = parts_of(shard) if zero == 3 else []
    fp32, on_cpu = recipe.train.grad_dtype == "fp32", recipe.train.optimizer_memory == "cpu"
    settings = Settings(mesh, dtype, False, fp32, numbers_of(parts), on_cpu)
    return Layout(recipe, dp, tp, whole, shard, make_buckets(groups, settings), parts)
