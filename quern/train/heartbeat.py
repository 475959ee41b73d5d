"""Watch: tells the ranks of a mesh how far each of them is, and ends this one when another is lost.

A small thread of each rank writes its whereabouts to the store that the ranks met at, beat after beat, and looks
whether anyone has fallen. When this rank has stood at the same place of a training step for longer than the timeout, or
one of its collectives has failed, the beats tell the cause: the rank that beats no more (killed, or stopped), or that
is behind. One rank says it, with the cause's number, collective and step; then all end, and torchrun starts them anew
from the newest good checkpoint.

Nobody is timed before the first step is over: loading data and compiling take each rank its own time, and only the
collectives' own timeout (mesh.SET_UP_TIMEOUT) counts; nor is a rank that beats while it saves or evaluates. A rank
that waits for rank 0 to prepare the data, however long, counts rank 0's beats as progress. It is the same over gloo
and NCCL, whose own timeouts know neither names nor steps.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from quern.mesh import FIRST_STEP, FOR_MAIN, STEPPING, Mesh

BEAT_SECONDS = 1.0
BEATS_TO_TELL = 4
"""A rank whose beat stays the same for so long has stopped."""
GRACE_SECONDS = 10.0
"""When another rank has fallen: how long this one may take to notice by itself."""
STORE_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Beat:
    """What a rank last wrote of itself. machine, parent, process: to end it where it is a sibling."""

    number: int
    doing: str
    step: int | None
    calls: int
    call: str
    waiting: bool
    machine: str
    parent: int
    process: int

    @property
    def place(self) -> tuple[int, int, bool]:
        """Grows while a rank trains; the same for ranks that wait in the same collective."""
        return (-1 if self.step is None else self.step, self.calls, self.waiting)

    @property
    def timed(self) -> bool:
        return self.doing == FOR_MAIN or (self.step is not None and self.doing != FIRST_STEP)

    def __str__(self) -> str:
        if self.step is None:
            return self.doing
        at = "in" if self.waiting else "after it began"
        call = f", {at} {self.call} (its collective {self.calls} of the step)" if self.calls else ""
        return f"{self.doing}, step {self.step + 1}{call}"


class Watch:
    """Watches from the moment it is made; `close` it when the ranks are done, before the first of them leaves.

    timeout: seconds without progress in a training step, after which the cause is looked for; log: takes a line;
    orphaned: whether what started this process is gone; end: ends this process at once.
    """

    def __init__(
        self,
        mesh: Mesh,
        timeout: float,
        log: Callable[[str], None],
        orphaned: Callable[[], bool],
        end: Callable[[], None],
    ) -> None:
        self.mesh, self.timeout, self.log, self.orphaned, self.end = mesh, timeout, log, orphaned, end
        self.beat_seconds = min(BEAT_SECONDS, timeout / 10)
        self._number = 0
        self._process = (socket.gethostname(), os.getppid(), os.getpid())
        self._closed = threading.Event()
        self._falling = threading.Lock()
        self._standing: list[int] = []
        """Ranks that were found to beat no more."""
        self._board = _Board(mesh)
        self._beat()
        self._thread = threading.Thread(target=self._run, args=(_Board(mesh),), name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    # When this rank falls ---------------------------------------------------------------------------------------

    def fell(self, reason: str, final: bool = False) -> None:
        """Leaves this rank's last words for the others. final: a restart would not help."""
        if self._falling.acquire(blocking=False):
            self._board.leave(reason, final)
        else:
            time.sleep(GRACE_SECONDS)  # the thread was first, and ends the process when it has spoken

    def lost(self, why: str) -> None:
        """A collective has failed: says who is the cause, unless it has said so itself or another rank does."""
        if not self._falling.acquire(blocking=False):
            time.sleep(GRACE_SECONDS)
            return
        self._board.report_peer_loss()
        if self._board.words():
            return  # who fell has said why
        cause = self._still(self._board)
        if not self._board.words():
            if cause and self._board.first():
                self.log(f"{cause}; all end")
            elif not cause:
                self.log(f"rank {self.mesh.rank} lost the others: {why}")

    def words_of_main(self, wait_seconds: float = 0.0) -> tuple[str, bool] | None:
        """Rank 0's last words and whether they are final, if it leaves any within this time."""
        until = time.monotonic() + wait_seconds
        while (found := self._board.words().get(0)) is None and time.monotonic() < until:
            time.sleep(0.05)
        return found

    # The thread -------------------------------------------------------------------------------------------------

    def _run(self, board: _Board) -> None:
        since, place = time.monotonic(), None
        while not self._closed.wait(self.beat_seconds):
            if self.orphaned():
                if self.mesh.main:
                    self.log("the process that started the ranks is gone: they end; go on with --resume")
                self.end()
            try:
                own = self._beat(board)
                now_at = board.beat_of_main() if own.doing == FOR_MAIN else own.place
                if now_at != place:
                    since, place = time.monotonic(), now_at
                if board.words() and not self._closed.wait(GRACE_SECONDS):
                    self.end()
                elif own.timed and time.monotonic() - since > self.timeout:
                    self._look_for_cause(board)
            except RuntimeError as error:  # torch's stores raise nothing narrower
                if not self._closed.wait(self.beat_seconds) and not self.orphaned():
                    self.log(f"rank {self.mesh.rank} cannot reach the others' store any more ({error}): it ends")
                    self.end()

    def _beat(self, board: _Board | None = None) -> Beat:
        self._number += 1
        at = self.mesh.whereabouts
        beat = Beat(self._number, at.doing, at.step, at.calls, at.call, at.waiting, *self._process)
        (board or self._board).write(beat)
        return beat

    def _look_for_cause(self, board: _Board) -> None:
        """Ends this process, with the cause said, unless there is a reason to wait on."""
        cause = self._still(board) or self._behind(board)
        if cause is None or not self._falling.acquire(blocking=False):
            return
        if board.first():
            board.leave(cause, False)
            self.log(f"{cause}; all end")
        for rank, beat in board.beats().items():
            if rank in self._standing and (beat.machine, beat.parent) == self._process[:2]:
                os.kill(beat.process, signal.SIGKILL)  # it is stopped, and would not hear anything milder
        self.end()

    def _still(self, board: _Board) -> str | None:
        """Who beats no more."""
        before = board.beats()
        for _ in range(BEATS_TO_TELL):
            time.sleep(self.beat_seconds)
            self._beat(board)
        after = board.beats()
        self._standing = [
            rank for rank, beat in after.items() if beat.number == before[rank].number and rank not in board.mourning()
        ]
        places = "; ".join(f"rank {rank} is gone or stopped, last seen {after[rank]}" for rank in self._standing)
        own = after[self.mesh.rank]
        return f"{places}; rank {self.mesh.rank} is {own}" if places else None

    def _behind(self, board: _Board) -> str | None:
        beats = board.beats()
        own = beats[self.mesh.rank]
        if any(beat.doing != STEPPING for beat in beats.values()):
            return None  # it saves or evaluates, and it is alive
        late = min(beats, key=lambda rank: beats[rank].place)
        waited = f"rank {self.mesh.rank} has waited for more than {self.timeout:g} s, {own}"
        if beats[late].place < own.place:
            return f"rank {late} is behind, {beats[late]}; {waited}"
        if own.waiting and all(beat.place == own.place for beat in beats.values()):
            return f"no rank is behind and nothing arrives: is the network whole? {waited}"
        return None


class _Board:
    """What ranks write for each other. Each thread has its own: a call blocks its connection."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.ranks = mesh.rank, range(mesh.world.size)
        self.store = PrefixStore("watch", mesh.store.clone())
        self.store.set_timeout(STORE_TIMEOUT)

    def write(self, beat: Beat) -> None:
        self.store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def beats(self) -> dict[int, Beat]:
        return {rank: Beat(**beat) for rank, beat in self._read("beat").items()}

    def beat_of_main(self) -> bytes:
        return self.store.get("beat/0")

    def leave(self, reason: str, final: bool) -> None:
        self.store.set(f"words/{self.rank}", json.dumps([reason, final]))
        self.store.add("fallen", 1)

    def words(self) -> dict[int, tuple[str, bool]]:
        if not self.store.check(["fallen"]):
            return {}
        return {rank: (reason, final) for rank, (reason, final) in self._read("words").items()}

    def report_peer_loss(self) -> None:
        """This rank falls because another one did."""
        self.store.set(f"mourning/{self.rank}", "1")

    def mourning(self) -> set[int]:
        return set(self._read("mourning"))

    def first(self) -> bool:
        """Whether nobody has spoken for all yet."""
        return self.store.add("spoken", 1) == 1

    def _read(self, kind: str) -> dict[int, Any]:
        there = [rank for rank in self.ranks if self.store.check([f"{kind}/{rank}"])]
        return {rank: json.loads(self.store.get(f"{kind}/{rank}")) for rank in there}
