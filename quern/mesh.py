"""The mesh of processes: data-parallel replicas by tensor-parallel shards, and the collectives between them.

Rank = replica · tp + shard: the shards of one replica are neighbours, since they talk most. Every collective that
quern makes goes through a `Group`, which counts what it moves, so that what a layout costs is measured and not assumed.
In a group of one process nothing is sent: the same code runs on one process and on many. Which tensors travel, and
when, is not decided here (parallel/).

Bytes are those that one rank sends with a ring (Thakur et al., 2005), n ranks, for a tensor of S bytes in full:
all-reduce 2·(n-1)/n·S; reduce-scatter, all-gather, all-to-all and broadcast (n-1)/n·S.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

# The same under their newer names; the older ones warn from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SET_UP_TIMEOUT = timedelta(minutes=20)
"""Until training runs: ranks load data and compile at their own pace."""


@dataclass
class Traffic:
    """What one rank sent: bytes and calls by kind of collective, and the seconds it stood still waiting for them."""

    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    waited_seconds: float = 0.0

    def reset(self) -> None:
        self.bytes.clear()
        self.calls.clear()
        self.waited_seconds = 0.0


class Pending:
    """A collective under way; `wait` before its tensors are read or written."""

    def __init__(self, work: Any, traffic: Traffic) -> None:
        self._work, self._traffic = work, traffic

    def wait(self) -> None:
        if self._work is None:
            return
        start = time.perf_counter()
        self._work.wait()
        self._traffic.waited_seconds += time.perf_counter() - start
        self._work = None


class Group:
    """Some ranks of the mesh. Tensors are contiguous; all ranks of a group make the same calls in the same order."""

    def __init__(self, name: str, size: int, rank: int, group: Any = None) -> None:
        """group: torch's process group, None for a group of one."""
        self.name, self.size, self.rank, self.group = name, size, rank, group
        self.traffic = Traffic()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """In place. op: "sum", "max" or "min"."""
        kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        if self.size == 1:
            return Pending(None, self.traffic)
        self._count("all_reduce", 2 * tensor.nbytes)
        return self._pending(dist.all_reduce(tensor, kinds[op], self.group, async_op=True))

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Pending:
        """out = the sum over ranks of their `whole`, this rank's equal part of it (cut along the first dim)."""
        if self.size == 1:
            out.copy_(whole.view_as(out))
            return Pending(None, self.traffic)
        self._count("reduce_scatter", whole.nbytes)
        return self._pending(_reduce_scatter(out, whole, group=self.group, async_op=True))

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        """whole = the parts of all ranks, one after the other along the first dim."""
        if self.size == 1:
            whole.view_as(part).copy_(part)
            return Pending(None, self.traffic)
        self._count("all_gather", whole.nbytes)
        return self._pending(_all_gather(whole, part, group=self.group, async_op=True))

    def all_to_all(self, out: Tensor, whole: Tensor) -> Pending:
        """Part i (along the first dim) of `whole` goes to rank i; `out` holds what came, in the order of ranks."""
        if self.size == 1:
            out.copy_(whole)
            return Pending(None, self.traffic)
        self._count("all_to_all", whole.nbytes)
        return self._pending(dist.all_to_all_single(out, whole, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        """In place, from the group's rank `source`."""
        if self.size == 1:
            return Pending(None, self.traffic)
        self._count("broadcast", tensor.nbytes)
        return self._pending(dist.broadcast(tensor, group=self.group, group_src=source, async_op=True))

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """A small JSON-like value from the group's rank `source`; what the others hand in is ignored."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's small JSON-like value, on every rank, in the order of ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def _count(self, kind: str, size_in_bytes: int) -> None:
        self.traffic.bytes[kind] += size_in_bytes * (self.size - 1) // self.size
        self.traffic.calls[kind] += 1

    def _pending(self, work: Any) -> Pending:
        return Pending(work, self.traffic)


@dataclass(frozen=True)
class Mesh:
    """dp replicas of tp shards. data: the ranks that hold the same shard of each replica; model: the shards of this
    replica; world: all."""

    dp: int
    tp: int
    rank: int
    data: Group
    model: Group
    world: Group
    files: Group
    """All again, over gloo and with an order of calls of its own: what is saved in the background."""

    @property
    def main(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def traffic(self) -> dict[str, int]:
        """Bytes sent so far, by "group/kind"."""
        return {
            f"{group.name}/{kind}": count
            for group in (self.data, self.model, self.world)
            for kind, count in sorted(group.traffic.bytes.items())
        }

    def reset_traffic(self) -> None:
        for group in (self.data, self.model, self.world):
            group.traffic.reset()


def alone() -> Mesh:
    """One process."""
    return Mesh(1, 1, 0, *(Group(name, 1, 0) for name in ("data", "model", "world", "files")))


def connect(tp: int, device: torch.device, rank: int, ranks: int, timeout: timedelta = SET_UP_TIMEOUT) -> Mesh:
    """Joins the other processes (their addresses are in the environment, as torchrun sets it) into ranks/tp × tp.

    Raises ValueError, naming the valid sizes, when tp does not divide the number of ranks.
    """
    if ranks % tp:
        valid = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ValueError(f"--tp {tp} does not divide {ranks} ranks: use one of {valid}")
    if ranks == 1:
        return alone()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=ranks, timeout=timeout)
    mesh = init_device_mesh(device.type, (ranks // tp, tp), mesh_dim_names=("data", "model"))
    groups = {}
    for name in ("data", "model"):
        group = mesh.get_group(name)
        size = dist.get_world_size(group)
        groups[name] = Group(name, size, dist.get_rank(group), group if size > 1 else None)
    files = Group("files", ranks, rank, dist.new_group(backend="gloo", timeout=timeout))
    return Mesh(ranks // tp, tp, rank, **groups, world=Group("world", ranks, rank, dist.group.WORLD), files=files)


def disconnect(mesh: Mesh) -> None:
    if mesh.world.size > 1:
        dist.destroy_process_group()
