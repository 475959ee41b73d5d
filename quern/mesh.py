"""The mesh of processes: data-parallel replicas by tensor-parallel shards, and the collectives between them.

Rank = replica · tp + shard, so the shards of one replica, which communicate most, are neighbours. Every collective goes
through a `ProcessGroup`, which counts the bytes of tensors that it moves. A group of one process sends nothing, so the
same code runs on one process and on many. `Progress` is for the failure reports of train/heartbeat.py.

Bytes are those that one rank sends with a ring (Thakur et al., 2005), n ranks, for a tensor of S bytes in full:
all-reduce 2·(n-1)/n·S; reduce-scatter, all-gather and all-to-all (n-1)/n·S.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.autograd.profiler import record_function
from torch.distributed.distributed_c10d import PrefixStore

from quern.process import environment, number_of, to_stderr, waiting

# torch 2.13 renamed these two, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SET_UP_TIMEOUT = timedelta(minutes=20)
"""Time limit of meeting and of every collective: ranks load data and compile at different speeds."""

WAITING = "waiting: "
"""How the names of waits begin in a profile (train/timeline.py)."""


class PeersLostError(RuntimeError):
    """A collective failed because another rank exited. The message names the collective."""


TRAINING, FIRST_STEP, FOR_MAIN = "training", "compiling in the first step", "waiting for rank 0"
SETTING_UP, SAMPLING, EVALUATING = "setting up", "sampling replies", "evaluating"


@dataclass
class Progress:
    """This rank's current step and collective."""

    phase: str = SETTING_UP  # the activity of the rank
    step: int | None = None  # None before training
    calls: int = 0  # collectives that the rank began within the step
    call: str = "none yet"  # the last one of them
    waiting: bool = False  # whether the rank is blocked in a collective
    beats: int = 0  # how often train/heartbeat.py has published this

    @property
    def position(self) -> tuple[int, int, bool]:
        """Grows while a rank trains; equal for ranks that wait in the same collective."""
        return (-1 if self.step is None else self.step, self.calls, self.waiting)

    @property
    def timed(self) -> bool:
        """Whether a rank that makes no progress here may be reported as failed."""
        return self.phase == FOR_MAIN or (self.step is not None and self.phase not in (FIRST_STEP, SAMPLING))

    def __str__(self) -> str:
        if self.step is None:
            return self.phase
        at = "in" if self.waiting else "after it began"
        call = f", {at} {self.call} (its collective {self.calls} of the step)" if self.calls else ""
        return f"{self.phase}, step {self.step + 1}{call}"

    def begin(self, phase: str = SETTING_UP, step: int | None = None) -> None:
        """Begins a step, or without one a stage, which sets up in its own time, without a limit."""
        self.phase, self.step, self.calls = phase, step, 0

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Names a phase in which one rank may take longer than the others."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before  # not after an error: the report names the phase

    @contextmanager
    def calling(self, call: str, begins: bool = True, waits: bool = True) -> Iterator[None]:
        """Records that this rank begins a collective, waits for one, or both. Raises PeersLostError where it fails."""
        if begins:
            self.calls, self.call = self.calls + 1, call
        self.waiting = waits
        try:
            yield
        except RuntimeError as error:
            raise PeersLostError(f"{call} failed: {str(error).splitlines()[0][:200]}") from error
        finally:
            self.waiting = False


class Pending:
    """A running collective. Call `wait` before you read or write its tensors."""

    def __init__(self, work: Any, group: ProcessGroup, call: str = "") -> None:
        self._work, self._group, self._call = work, group, call

    def wait(self) -> None:
        if self._work is None:
            return
        with self._group.blocked(self._call):
            self._work.wait()
        self._work = None


class ProcessGroup:
    """Some ranks of the mesh. Tensors must be contiguous. All ranks of a group make the same calls in the same order.
    group: torch's process group; None in a process that is alone."""

    def __init__(self, name: str, size: int, rank: int, group: Any = None, progress: Progress | None = None) -> None:
        self.name, self.size, self.rank, self.group = name, size, rank, group
        self.progress = progress or Progress()
        self.sent_bytes: Counter[str] = Counter()  # of this rank, by kind of collective
        self.waited_seconds = 0.0

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """Reduces in place. op: "sum" or "max"."""
        kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return self.start("all_reduce", self._ring(2 * tensor.nbytes), dist.all_reduce, tensor, op=kind)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Pending:
        """out = this rank's equal part, along the first dim, of the sum of `whole` over the ranks."""
        if self.size == 1:
            out.copy_(whole.view_as(out))
        return self.start("reduce_scatter", self._ring(whole.nbytes), _reduce_scatter, out, whole)

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        """whole = the parts of all ranks, concatenated along the first dim in rank order."""
        if self.size == 1:
            whole.view_as(part).copy_(part)
        return self.start("all_gather", self._ring(whole.nbytes), _all_gather, whole, part)

    def all_to_all(self, out: Tensor, whole: Tensor, received: list[int], sent: list[int]) -> Pending:
        """Sends parts of `whole`, along the first dim, to the ranks; `out` receives theirs in rank order. received,
        sent: the lengths of the parts."""
        if self.size == 1:
            out.copy_(whole)
        leaving = len(whole) - sent[self.rank]
        return self.start("all_to_all", whole[:leaving].nbytes, dist.all_to_all_single, out, whole, received, sent)

    def broadcast_object(self, value: Any) -> Any:
        """Returns the value of the group's first rank, a small JSON-like object, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with self.blocked(f"broadcast of a value over {self.name}", begins=True):
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, small JSON-like objects, in rank order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.blocked(f"all_gather of values over {self.name}", begins=True):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def barrier(self) -> None:
        if self.size > 1:
            with self.blocked(f"barrier over {self.name}", begins=True):
                dist.barrier(group=self.group)

    @contextmanager
    def blocked(self, call: str, begins: bool = False) -> Iterator[None]:
        """Wraps a collective, or the wait for an earlier one, until it is done. Raises PeersLostError if it fails."""
        start = time.perf_counter()
        with record_function(f"{WAITING}{call}"), self.progress.calling(call, begins):
            yield
        self.waited_seconds += time.perf_counter() - start

    def _ring(self, size_in_bytes: int) -> int:
        """Bytes that a ring sends of a tensor: all but this rank's part."""
        return size_in_bytes * (self.size - 1) // self.size

    def start(self, kind: str, sent_bytes: int, start: Callable[..., Any], *args: Any, **options: Any) -> Pending:
        """Starts a collective and counts it. A group of one has nothing to wait for."""
        if self.size == 1:
            return Pending(None, self)
        self.sent_bytes[kind] += sent_bytes
        call = f"{kind} over {self.name}"
        with self.progress.calling(call, waits=False):
            return Pending(start(*args, group=self.group, async_op=True, **options), self, call)


@dataclass(frozen=True)
class Mesh:
    """dp replicas of tp shards."""

    dp: int
    tp: int
    rank: int
    data: ProcessGroup  # the ranks that hold the same shard of each replica
    model: ProcessGroup  # the shards of this replica
    world: ProcessGroup  # all ranks
    progress: Progress = field(default_factory=Progress)
    store: Any = None  # torch's Store, through which ranks find each other; None for one process
    zero: int = 2  # ZeRO's stage: replicas share in 2 the optimizer's state, in 3 also parameters and gradients

    @property
    def main(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def traffic(self) -> dict[str, int]:
        """Returns the bytes sent so far, by "group/kind"."""
        return {
            f"{group.name}/{kind}": count
            for group in (self.data, self.model, self.world)
            for kind, count in sorted(group.sent_bytes.items())
        }

    def waited_seconds(self) -> float:
        """Returns how long this process was blocked in collectives. On GPUs the device waits, so this stays small."""
        return sum(group.waited_seconds for group in (self.data, self.model, self.world))


def alone() -> Mesh:
    """Returns the mesh of a single process."""
    data, model, world = (ProcessGroup(name, 1, 0) for name in ("data", "model", "world"))
    return Mesh(1, 1, 0, data, model, world)


def refuse_uneven(ranks: int, tp: int, zero: int = 2) -> None:
    """Raises ValueError when ranks cannot be replicas of tp shards, or one replica would share its parameters."""
    if ranks % tp:
        valid = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise ValueError(f"--tp {tp} does not divide {ranks} ranks: use one of {valid}")
    if zero == 3 and ranks == tp:
        raise ValueError("--zero 3 shares parameters among replicas, and there is one: give more --ranks, or --zero 2")


def connect(
    tp: int,
    device: torch.device,
    rank: int,
    ranks: int,
    timeout: timedelta = SET_UP_TIMEOUT,
    met: Callable[[], None] = lambda: None,
    zero: int = 2,
) -> Mesh:
    """Connects to the other processes, as ranks/tp replicas of tp shards.

    Args:
        zero: See `Mesh`.
        met: Called once every process has arrived. The connections that follow take seconds. If a rank exits then, gloo
            waits five times the timeout (github.com/pytorch/gloo/issues/520), so the caller must set a time limit.

    Raises:
        ValueError: when tp does not divide the number of ranks, one replica would share its parameters, or on Metal.
        TimeoutError: when not all ranks arrive in time.
    """
    refuse_uneven(ranks, tp, zero)
    if ranks == 1:
        return alone()
    if device.type == "mps":  # gloo cannot send its tensors
        raise ValueError("several ranks cannot compute on Metal: add --device cpu, or leave out --ranks")
    stores: list[Any] = []
    one_a_machine = to_stderr if environment().get("LOCAL_RANK", "0") == "0" else lambda line: None
    with waiting(lambda: _absent(stores, ranks), timeout.total_seconds(), one_a_machine):
        stores.append(_open_store(rank, ranks, timeout))
        store = _meet(stores[0], rank, ranks, timeout)
    met()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    progress, groups = Progress(), dict[str, ProcessGroup]()
    replicas = [list(range(first, first + tp)) for first in range(0, ranks, tp)]
    for name, lists in {"data": list(map(list, zip(*replicas, strict=True))), "model": replicas, "world": []}.items():
        group: Any = dist.group.WORLD
        if len(lists) > 1:  # torch's device mesh would leave its groups at the backend's own timeout
            group, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout)
        groups[name] = ProcessGroup(name, dist.get_world_size(group), dist.get_rank(group), group, progress)
    return Mesh(ranks // tp, tp, rank, **groups, progress=progress, store=store, zero=zero)


def await_listener(host: str, port: int, seconds: float, who: str, own: bool = False) -> bool:
    """Waits until a process listens there.

    Args:
        who: Who should listen, for the message.
        own: Whether to return True, without waiting, if the address is this machine's and its port is free.

    Raises:
        TimeoutError: with the last reason; also a name that does not resolve yet is tried until then.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            if own and _is_free_here(host, port):
                return True
            socket.create_connection((host, port), timeout=1).close()
            return False
        except OSError as error:
            if time.monotonic() >= until:
                reason = f"within {seconds:.0f} s ({error.strerror or error})"
                raise TimeoutError(f"{who} did not answer at {host}:{port} {reason}: start it") from error
        time.sleep(0.1)


def _is_free_here(host: str, port: int) -> bool:
    """Returns whether the address is this machine's and its port is free. Raises OSError for an unknown name."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            return True
    return False


def _open_store(rank: int, ranks: int, timeout: timedelta) -> Any:
    """Opens the store that torchrun's variables name. Rank 0 hosts it, unless torchrun's agent does.

    torch's own rendezvous blocks in native code until the others are there, and no signal ends it. Raises TimeoutError.
    """
    given = environment()
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]:
        raise ValueError(f"WORLD_SIZE is {ranks}, so set {' and '.join(missing)} too: the address of rank 0")
    host, port = given["MASTER_ADDR"], number_of("MASTER_PORT", 0)
    hosts = rank == 0 and given.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if not hosts:
        await_listener(host, port, timeout.total_seconds(), f"rank 0 of {ranks}")
    return TCPStore(host, port, ranks, hosts, timeout, wait_for_workers=False, multi_tenant=True)


def _meet(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    """Returns the part of the store that belongs to this start, once every rank is there. Raises TimeoutError.

    torchrun keeps one store across restarts, with the stale addresses and beats of earlier ranks. So rank 0 numbers the
    starts, and the other ranks wait for the newest number. A rank whose own mark is already set has found the number of
    an earlier start, and waits on. Only a live rank 0 completes a start.
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
    raise TimeoutError(f"not all of {ranks} ranks arrived within {timeout.total_seconds():.0f} s")


def _absent(stores: list[Any], ranks: int) -> str:
    """Names the ranks that have not arrived, for messages. stores: holds the store, once it is open."""
    absent = [0]  # it makes the store, and numbers the start
    if stores and stores[0].check(["start"]):
        start = stores[0].get("start").decode()
        absent = [rank for rank in range(ranks) if not stores[0].check([f"{start}/rank {rank}"])]
    at = f"{environment().get('MASTER_ADDR')}:{environment().get('MASTER_PORT')}"
    return f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent))} of {ranks} at {at}"


def disconnect(mesh: Mesh) -> None:
    if mesh.world.size > 1:
        dist.destroy_process_group()
