"""Heartbeat: every rank publishes its progress, and one rank names the rank that failed, hangs or is slow.

A thread of each rank writes the rank's `Progress` to the store through which the ranks found each other, and checks
whether a peer rank has failed; docs/parallelism.md, "When a rank fails", says how. torch's monitored barrier and NCCL's
timeouts name neither the step nor the collective, so they are not used here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from statistics import median
from typing import NamedTuple, NoReturn

from torch.distributed.distributed_c10d import PrefixStore

from quern.mesh import FOR_MAIN, TRAINING, Mesh, Progress

BEAT_SECONDS = 1.0
STALE_BEATS = 4
"""A rank whose beat does not change for this many beats has stopped."""
GRACE_SECONDS = 10.0
"""Seconds in which this rank may notice the failure of a peer by itself."""
STORE_TIMEOUT = timedelta(seconds=10)
WINDOW_STEPS = 20
"""Steps whose times are summed, since single steps differ for many reasons."""
SLOW = 1.5
"""A slow rank takes this many times the median of the other ranks."""


class Failure(NamedTuple):
    """The failure that was reported first. final: a restart would not help."""

    rank: int
    reason: str
    final: bool


class Heartbeat:
    """Runs from its construction until `close`, which every rank calls before the first of them leaves.

    timeout: seconds without progress in a training step, or without a sign of rank 0 while this rank waits for it,
    after which this rank looks for the cause; parent: the process that started the ranks, without which this one exits.
    """

    def __init__(self, mesh: Mesh, timeout: float, log: Callable[[str], None], parent: int) -> None:
        self.mesh, self.timeout, self.log = mesh, timeout, log
        self._store = PrefixStore("heartbeat", mesh.store.clone())  # its own connection: a call blocks it
        self._store.set_timeout(STORE_TIMEOUT)
        self._interval = min(BEAT_SECONDS, timeout / 10)
        self._parent = [socket.gethostname(), parent]
        self._store.set(f"process/{mesh.rank}", json.dumps([*self._parent, os.getpid()]))
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def report(self, reason: str, final: bool = False) -> bool:
        """Records why the ranks exit, and returns whether this rank is the first to say so."""
        failure = json.dumps(Failure(self.mesh.rank, reason, final))
        return self._store.compare_set("failure", "", failure) == failure.encode()

    def failure(self, wait_seconds: float = 0.0) -> Failure | None:
        """Returns the failure that was reported first, if one is reported within this time."""
        until = time.monotonic() + wait_seconds
        while not self._store.check(["failure"]):
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)
        return Failure(*json.loads(self._store.get("failure")))

    def report_peer_loss(self, why: str) -> bool:
        """Logs the cause of a failed collective, unless another rank reports it. Returns whether the failure is final.

        why: the failure; "" if this rank was asked to end, which is no failure where no rank is gone.
        """
        self._end_if_orphaned()
        lost = f"rank {self.mesh.rank} lost the others: {why}"
        try:
            if self.failure() is None:
                cause = self._describe(self._stopped() if why else self._dead()) or (lost if why else None)
                if cause is not None:
                    self._log_first(cause)
            failure = self.failure()
            return failure is not None and failure.final
        except RuntimeError:  # the store is gone, too
            self.log(lost)
            return False

    def _run(self) -> None:
        since, position = time.monotonic(), None
        while not self._closed.wait(self._interval):
            self._end_if_orphaned()
            try:
                self._publish()
                progress = self.mesh.progress
                now_at = self._store.get("beat/0") if progress.phase == FOR_MAIN else progress.position
                if now_at != position:
                    since, position = time.monotonic(), now_at
                if self.failure() and not self._closed.wait(GRACE_SECONDS):
                    exit_now(1)
                elif progress.timed and time.monotonic() - since > self.timeout:
                    self._end_with_cause()
            except RuntimeError as error:  # torch's stores raise nothing narrower
                if not self._closed.wait(self._interval):
                    self._end_if_orphaned()
                    self.log(f"rank {self.mesh.rank} cannot reach the others' store any more ({error}): it ends")
                    exit_now(1)

    def _end_if_orphaned(self) -> None:
        if os.getppid() != self._parent[1]:
            self._ending.acquire()  # never released: one thread logs and ends the process
            if self.mesh.main:
                self.log("the process that started the ranks is gone: they end")
            exit_now(1)

    def _publish(self) -> None:
        self.mesh.progress.beats += 1
        self._store.set(f"beat/{self.mesh.rank}", json.dumps(asdict(self.mesh.progress)))

    def _beats(self) -> dict[int, Progress]:
        there = [rank for rank in range(self.mesh.world.size) if self._store.check([f"beat/{rank}"])]
        return {rank: Progress(**json.loads(self._store.get(f"beat/{rank}"))) for rank in there}

    def _stopped(self) -> dict[int, Progress]:
        """Returns the last beats of the ranks whose beats have stopped, at once if processes here are gone."""
        before = self._beats()
        for _ in range(STALE_BEATS):
            if dead := self._dead():
                return dead
            time.sleep(self._interval)
            self._publish()
        after = self._beats()
        return {rank: after[rank] for rank in before if after[rank].beats == before[rank].beats}

    def _dead(self) -> dict[int, Progress]:
        """Returns the last beats of this machine's ranks whose processes are gone."""
        dead = {}
        for rank, last in self._beats().items():
            *parent, process = json.loads(self._store.get(f"process/{rank}"))
            try:
                os.kill(process if parent == self._parent else os.getpid(), 0)
            except ProcessLookupError:
                dead[rank] = last
        return dead

    def _describe(self, stopped: dict[int, Progress]) -> str | None:
        places = "; ".join(f"rank {rank} is gone or stopped, last seen {last}" for rank, last in stopped.items())
        return f"{places}; rank {self.mesh.rank} is {self.mesh.progress}" if places else None

    def _log_first(self, cause: str) -> None:
        """Reports the cause, and logs it unless another rank reported one before."""
        if self.report(cause):
            self.log(f"{cause}; all end")

    def _end_with_cause(self) -> None:
        """Logs why this rank makes no progress, and ends the process. Returns when there is a reason to wait."""
        stopped = self._stopped()
        if (cause := self._describe(stopped) or self._behind()) is None:
            return
        self._log_first(cause)
        for rank in stopped:
            *parent, process = json.loads(self._store.get(f"process/{rank}"))
            if parent == self._parent:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)  # a suspended process handles no other signal
        exit_now(1)

    def _behind(self) -> str | None:
        ranks = self._beats()
        if any(progress.phase != TRAINING for progress in ranks.values()):
            return None  # the rank is alive and saves or evaluates
        own, late = ranks[self.mesh.rank], min(ranks, key=lambda rank: ranks[rank].position)
        waited = f"rank {self.mesh.rank} has waited for more than {self.timeout:g} s, {own}"
        if ranks[late].position < own.position:
            return f"rank {late} is behind, {ranks[late]}; {waited}"
        if own.waiting and all(progress.position == own.position for progress in ranks.values()):
            return f"no rank is behind and nothing arrives: is the network whole? {waited}"
        return None


def exit_now(code: int) -> NoReturn:
    """Exits this process without cleanup, which would wait for collectives that cannot end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


class StragglerDetector:
    """Names the ranks that hold the others up, from each rank's own computing time. Gives the same on all ranks."""

    def __init__(self) -> None:
        self._steps: list[Sequence[float]] = []
        self._named: set[int] = set()

    def observe(self, seconds: Sequence[float]) -> str | None:
        """Takes each rank's seconds in this step, without waiting. Returns a line for the user when a window ends in
        which a rank was slow that was not slow in the window before."""
        self._steps.append(seconds)
        if len(self._steps) < WINDOW_STEPS:
            return None
        sums, self._steps = [sum(own) for own in zip(*self._steps, strict=True)], []
        times = [own / median(sums[:rank] + sums[rank + 1 :]) for rank, own in enumerate(sums)]
        before, self._named = self._named, {rank for rank, ratio in enumerate(times) if ratio > SLOW}
        lines = [
            f"rank {rank} is slow: over {WINDOW_STEPS} steps it computed {times[rank]:.1f} times as long as the "
            "other ranks' median, and they wait for it: look what else runs there"
            for rank in sorted(self._named - before)
        ]
        return "; ".join(lines) or None
