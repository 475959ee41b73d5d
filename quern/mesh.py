"""The mesh of processes: data-parallel replicas by tensor-parallel shards, and the collectives between them.

Rank = replica · tp + shard: the shards of one replica are neighbours, since they talk most. Every collective that
quern makes goes through a `ProcessGroup`, which counts what it moves, so that what a layout costs is measured and
not assumed. In a group of one process nothing is sent: the same code runs on one process and on many. Which tensors
travel, and when, is decided in parallel/. `Whereabouts` records how far this process is, for the other ranks
(train/heartbeat.py).

Bytes are those that one rank sends with a ring (Thakur et al., 2005), n ranks, for a tensor of S bytes in full:
all-reduce 2·(n-1)/n·S; reduce-scatter, all-gather, all-to-all and broadcast (n-1)/n·S.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# The same under their newer names; the older ones warn from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SET_UP_TIMEOUT = timedelta(minutes=20)
"""Until training runs: ranks load data and compile at their own pace."""


class PeersLostError(RuntimeError):
    """A collective failed because another rank is gone; the message says which collective."""


STEPPING, FIRST_STEP, FOR_MAIN = "training", "compiling in the first step", "waiting for rank 0"


@dataclass
class Whereabouts:
    """How far this process is. step: None before training; calls: collectives begun within the step; call: the last
    one; waiting: whether the process stands still in it."""

    doing: str = "setting up"
    step: int | None = None
    calls: int = 0
    call: str = "none yet"
    waiting: bool = False

    def begin_step(self, step: int, doing: str) -> None:
        self.doing, self.step, self.calls, self.call = doing, step, 0, "none yet"

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """While something else than a step is done, which may take one rank longer than the others."""
        before, self.doing = self.doing, what
        yield
        self.doing = before  # not after an error: where it happened is part of its report

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Around one collective. Raises PeersLostError where it fails."""
        self.calls, self.call = self.calls + 1, call
        with _losing_peers(call):
            yield

    @contextmanager
    def standing(self, call: str) -> Iterator[None]:
        """While the process waits for the others in a collective."""
        self.waiting = True
        try:
            with _losing_peers(call):
                yield
        finally:
            self.waiting = False


@contextmanager
def _losing_peers(call: str) -> Iterator[None]:
    try:
        yield
    except PeersLostError:
        raise
    except RuntimeError as error:
        raise PeersLostError(f"{call} failed: {str(error).splitlines()[0][:200]}") from error


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

    def __init__(self, work: Any, group: ProcessGroup, call: str = "") -> None:
        self._work, self._group, self._call = work, group, call

    def wait(self) -> None:
        if self._work is None:
            return
        with self._group.standing(self._call):
            self._work.wait()
        self._work = None


class ProcessGroup:
    """Some ranks of the mesh. Tensors are contiguous; all ranks of a group make the same calls in the same order."""

    def __init__(
        self, name: str, size: int, rank: int, group: Any = None, whereabouts: Whereabouts | None = None
    ) -> None:
        """group: torch's process group, None for a group of one; whereabouts: where its calls are noted."""
        self.name, self.size, self.rank, self.group = name, size, rank, group
        self.whereabouts = whereabouts or Whereabouts()
        self.traffic = Traffic()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """In place. op: "sum", "max" or "min"."""
        kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        if self.size == 1:
            return self._done()
        with self._counted("all_reduce", 2 * tensor.nbytes) as call:
            return Pending(dist.all_reduce(tensor, kinds[op], self.group, async_op=True), self, call)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Pending:
        """out = the sum over ranks of their `whole`, this rank's equal part of it (cut along the first dim)."""
        if self.size == 1:
            out.copy_(whole.view_as(out))
            return self._done()
        with self._counted("reduce_scatter", whole.nbytes) as call:
            return Pending(_reduce_scatter(out, whole, group=self.group, async_op=True), self, call)

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        """whole = the parts of all ranks, one after the other along the first dim."""
        if self.size == 1:
            whole.view_as(part).copy_(part)
            return self._done()
        with self._counted("all_gather", whole.nbytes) as call:
            return Pending(_all_gather(whole, part, group=self.group, async_op=True), self, call)

    def all_to_all(
        self, out: Tensor, whole: Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> Pending:
        """Part i (along the first dim) of `whole` goes to rank i; `out` holds what came, in the order of ranks.

        received, sent: the lengths of each rank's part of `out` and of `whole`, where they are not all equal.
        """
        if self.size == 1:
            out.copy_(whole)
            return self._done()
        leaving = len(whole) - (len(whole) // self.size if sent is None else sent[self.rank])
        with self._counted("all_to_all", whole[:leaving].nbytes, whole=False) as call:
            work = dist.all_to_all_single(out, whole, received, sent, self.group, async_op=True)
            return Pending(work, self, call)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        """In place, from the group's rank `source`."""
        if self.size == 1:
            return self._done()
        with self._counted("broadcast", tensor.nbytes) as call:
            return Pending(dist.broadcast(tensor, group=self.group, group_src=source, async_op=True), self, call)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """A small JSON-like value from the group's rank `source`; what the others hand in is ignored."""
        if self.size == 1:
            return value
        box = [value]
        with self.whole_call("broadcast of a value"):
            dist.broadcast_object_list(box, group=self.group, group_src=source)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's small JSON-like value, on every rank, in the order of ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.whole_call("all_gather of values"):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def barrier(self) -> None:
        if self.size > 1:
            with self.whole_call("barrier"):
                dist.barrier(group=self.group)

    @contextmanager
    def whole_call(self, kind: str) -> Iterator[None]:
        """Around a collective that returns when it is done. Raises PeersLostError where it fails."""
        call = f"{kind} over {self.name}"
        with self.whereabouts.calling(call), self.standing(call):
            yield

    @contextmanager
    def standing(self, call: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.whereabouts.standing(call):
            yield
        self.traffic.waited_seconds += time.perf_counter() - start

    @contextmanager
    def _counted(self, kind: str, size_in_bytes: int, whole: bool = True) -> Iterator[str]:
        """size_in_bytes: of the whole tensor, of which a ring does not send this rank's part; or of what is sent."""
        self.traffic.bytes[kind] += size_in_bytes * (self.size - 1) // self.size if whole else size_in_bytes
        self.traffic.calls[kind] += 1
        call = f"{kind} over {self.name}"
        with self.whereabouts.calling(call):
            yield call

    def _done(self) -> Pending:
        return Pending(None, self)


@dataclass(frozen=True)
class Mesh:
    """dp replicas of tp shards. data: the ranks that hold the same shard of each replica; model: the shards of this
    replica; world: all."""

    dp: int
    tp: int
    rank: int
    data: ProcessGroup
    model: ProcessGroup
    world: ProcessGroup
    files: ProcessGroup
    """All again, over gloo and with an order of calls of its own: what is saved in the background."""
    whereabouts: Whereabouts = field(default_factory=Whereabouts)
    store: Any = None
    """Where ranks meet (torch's Store), None for one process."""

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

    def waited_seconds(self) -> float:
        """How long this process has stood still in collectives. On GPUs the device waits, and this stays small."""
        return sum(group.traffic.waited_seconds for group in (self.data, self.model, self.world))

    def reset_traffic(self) -> None:
        for group in (self.data, self.model, self.world):
            group.traffic.reset()


def alone() -> Mesh:
    """One process."""
    data, model, world, files = (ProcessGroup(name, 1, 0) for name in ("data", "model", "world", "files"))
    return Mesh(1, 1, 0, data, model, world, files)


def refuse_uneven(ranks: int, tp: int) -> None:
    """Raises ValueError, naming the valid sizes, when tp does not divide the number of ranks."""
    if ranks % tp:
        valid = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ValueError(f"--tp {tp} does not divide {ranks} ranks: use one of {valid}")


def connect(
    tp: int,
    device: torch.device,
    rank: int,
    ranks: int,
    timeout: timedelta = SET_UP_TIMEOUT,
    met: Callable[[], None] = lambda: None,
) -> Mesh:
    """Joins the other processes (their addresses are in the environment, as torchrun sets it) into ranks/tp × tp.

    met: called once every process is there. What is left takes seconds, or an hour if one of them goes now, since gloo
    waits five times the timeout (github.com/pytorch/gloo/issues/520): bound it.
    Raises ValueError, naming the valid sizes, when tp does not divide the number of ranks.
    """
    refuse_uneven(ranks, tp)
    if ranks == 1:
        return alone()
    store, _, _ = next(iter(rendezvous("env://", rank, ranks, timeout=timeout)))
    store = _meet(store, rank, ranks, timeout)
    met()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    mesh = init_device_mesh(device.type, (ranks // tp, tp), mesh_dim_names=("data", "model"))
    whereabouts = Whereabouts()
    groups = {}
    for name in ("data", "model"):
        group = mesh.get_group(name)
        size = dist.get_world_size(group)
        groups[name] = ProcessGroup(name, size, dist.get_rank(group), group if size > 1 else None, whereabouts)
    groups["world"] = ProcessGroup("world", ranks, rank, dist.group.WORLD, whereabouts)
    files = ProcessGroup("files", ranks, rank, dist.new_group(backend="gloo", timeout=timeout))
    return Mesh(ranks // tp, tp, rank, **groups, files=files, whereabouts=whereabouts, store=store)


def _meet(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    """The part of the store that belongs to this start, once every rank is there.

    torchrun keeps one store when it starts ranks anew, with all that the ranks before them have left in it: addresses
    where nobody listens any more, and beats (heartbeat.py). Rank 0 numbers the starts; each of the others comes to
    the newest, and sees by its own mark there that a number is one of an earlier start; only a living rank 0 completes
    one. Raises TimeoutError.
    """
    if rank == 0:
        store.set("start", str(store.add("starts", 1)))
    came, pause, until = None, 0.01, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        start = store.get("start").decode() if store.check(["start"]) else None
        if start is not None and start != came and store.add(f"{start}/rank {rank}", 1) == 1:
            came = start
            store.add(f"{start}/came", 1)
        if rank == 0 and store.add(f"{start}/came", 0) == ranks:
            store.set(f"{start}/complete", "yes")
        if start is not None and start == came and store.check([f"{start}/complete"]):
            return PrefixStore(f"{start}/mesh", store)
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    raise TimeoutError(f"not all of {ranks} ranks came within {timeout.total_seconds():.0f} s")


def disconnect(mesh: Mesh) -> None:
    if mesh.world.size > 1:
        dist.destroy_process_group()
