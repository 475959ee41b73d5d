"""Hands the trials of a study to its workers, so that exactly as many finish as were asked for.

Workers are processes on any machines that share a storage; each may die at any moment. They need no lock of their own:

- Trials are numbered by the storage, which also hands a waiting trial to one worker only. The sweep is the first
  `wanted` trials that have not failed (`kept`). A worker that was given a later one fails it as surplus.
- A trial that was put into the queue has a key. If two workers put in the same key, only the first trial counts.
- A worker writes a heartbeat into the study. A running trial whose worker is dead fails, and a new trial with the same
  values and the finished runs of the dead one is put into the queue. A worker is dead if its process on this machine
  has ended, or if its heartbeat did not change for some minutes by this process's clock.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
RUN, WORKER = "run:", "worker:"
"""Prefixes of attributes: the record of a run of a trial; the heartbeat of a worker of the study."""
FAILURES = "failures"
"""Attribute: how many errors have ended the trial, or one that it repeats."""
ORIGIN = "origin"
"""Attribute: the key of the trial, or of the first one that it repeats."""


@dataclass(frozen=True)
class Patience:
    """Times in seconds: between heartbeats, until a silent worker is dead, and between looks at the other workers."""

    beat: float = 20.0
    dead: float = 180.0
    look: float = 1.0


class Queue:
    """The trials of a study for one worker. Use it in a `with` block.

    Args:
        study: The study; several workers may have it open.
        wanted: How many trials are to finish.
        only_queued: All trials are put into the queue by `add`; the sampler makes none.
        log: Takes lines for the user.
        parent: The process that must live; this one exits with it.
    """

    def __init__(
        self,
        study: optuna.Study,
        wanted: int,
        *,
        only_queued: bool,
        log: Callable[[str], None],
        patience: Patience | None = None,
        parent: int | None = None,
    ) -> None:
        self.study, self.wanted, self.only_queued, self.log = study, wanted, only_queued, log
        self.patience, self.parent = patience or Patience(), parent
        self.name = f"{WORKER}{uuid.uuid4().hex[:12]}"
        self._seen: dict[str, tuple[Any, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="heartbeat", daemon=True)

    def __enter__(self) -> Queue:
        self._beat(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._beat(-1)

    def alone(self) -> bool:
        """Whether no other worker is alive."""
        return self._alive() == {self.name}

    def add(self, points: Mapping[str, dict[str, Any]]) -> None:
        """Puts trials with fixed values into the queue. points: values by a key; known keys are skipped."""
        known = {trial.user_attrs.get("key") for trial in self._all()}
        for key, values in points.items():
            if key not in known:
                self._enqueue(key, values, **{ORIGIN: key})

    def trials(self) -> Iterator[optuna.Trial]:
        """Yields trials to run until all are finished, those of other workers too. Finish each before the next."""
        while len(self.finished()) < self.wanted:
            self._recover()
            every = self._all()
            waiting = any(trial.state == TrialState.WAITING for trial in every)
            if not waiting and (self.only_queued or len(self.kept(every)) >= self.wanted):
                time.sleep(self.patience.look)
                continue
            trial = self.study.ask()
            trial.set_user_attr("worker", self.name)
            if trial.number in {one.number for one in self.kept(self._all())}:
                yield trial
            else:
                trial.set_user_attr("surplus", True)
                self._tell(trial.number, TrialState.FAIL)

    def finish(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> bool:
        """Ends a trial of `trials`. Returns False if another worker has it, because this one was taken for dead."""
        return self._tell(trial.number, state, value)

    def finished(self) -> list[FrozenTrial]:
        """The finished trials of all workers, by number."""
        return [trial for trial in self.kept(self._all()) if trial.state in FINISHED]

    def kept(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """The trials that count. trials: all of the study, by number."""
        return [trial for trial in self._counted(trials) if trial.state != TrialState.FAIL][: self.wanted]

    def _all(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _counted(self, trials: Sequence[FrozenTrial]) -> Iterator[FrozenTrial]:
        """The trials that are not surplus and are the first with their key, failed ones too."""
        keys = {None} if self.only_queued else set()
        for trial in trials:
            key = trial.user_attrs.get("key")
            if key not in keys and not trial.user_attrs.get("surplus"):
                yield trial
                keys |= {key} - {None}

    def _enqueue(self, key: str, values: dict[str, Any], **attrs: Any) -> None:
        self.study.enqueue_trial(values, user_attrs={"key": key, "values": values, **attrs})

    def _tell(self, number: int, state: TrialState, value: float | None = None) -> bool:
        try:
            told = self.study.tell(number, value, state=state, skip_if_finished=True)
        except UpdateFinishedTrialError:
            return False
        return told.state == state

    def _recover(self) -> None:
        """Fails the running trials of dead workers, and puts every failed trial into the queue again."""
        every, alive = self._all(), self._alive()
        for trial in every:
            if trial.state == TrialState.RUNNING and self._abandoned(trial, alive):
                self.log(f"trial {trial.number} was left unfinished: it starts again")
                self._tell(trial.number, TrialState.FAIL)
        every = self._all()
        known = {trial.user_attrs.get("key") for trial in every}
        for trial in self._counted(every):
            if trial.state == TrialState.FAIL and f"retry:{trial.number}" not in known:
                kept = (name for name in trial.user_attrs if name.startswith(RUN) or name in (FAILURES, ORIGIN))
                attrs = {name: trial.user_attrs[name] for name in kept}
                values = {**trial.user_attrs.get("values", {}), **trial.params}
                self._enqueue(f"retry:{trial.number}", values, **attrs)

    def _abandoned(self, trial: FrozenTrial, alive: set[str]) -> bool:
        owner = trial.user_attrs.get("worker")
        if owner is None:  # its worker is just starting it, or died then
            return alive == {self.name} or self._unchanged(f"trial:{trial.number}", None)
        return owner == self.name or owner not in alive

    def _alive(self) -> set[str]:
        found = {self.name}
        for name, body in self.study.user_attrs.items():
            if name.startswith(WORKER) and body["beats"] >= 0 and name != self.name:
                local = body["machine"] == this_machine()
                if not (local and _has_ended(body["pid"])) and not self._unchanged(name, body["beats"]):
                    found.add(name)
        return found

    def _unchanged(self, name: str, state: Any) -> bool:
        now = time.monotonic()
        if name not in self._seen or self._seen[name][0] != state:
            self._seen[name] = state, now
        return now - self._seen[name][1] > self.patience.dead

    # The heartbeat ------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        beats, last, logged = 0, time.monotonic(), False
        while not self._ended.wait(min(1.0, self.patience.beat)):
            if self.parent is not None and os.getppid() != self.parent:
                os._exit(1)
            if time.monotonic() - last < self.patience.beat:
                continue
            try:
                self._beat(beats + 1)
                beats, last = beats + 1, time.monotonic()
            except Exception as error:  # such as a database that is restarting; without a heartbeat the trial is lost
                if not logged:
                    self.log(f"the heartbeat could not be written and is tried again: {type(error).__name__}: {error}")
                logged = True

    def _beat(self, beats: int) -> None:
        """beats: counts up; -1 is the end of the worker."""
        body = {"machine": this_machine(), "host": platform.node(), "pid": os.getpid(), "beats": beats}
        self.study.set_user_attr(self.name, body)


def this_machine() -> str:
    """Names the processes among which a process id is unique: on Linux the boot and the namespace, else the host."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    return platform.node()


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        return False
    return False
