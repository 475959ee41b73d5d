"""A study on disk: a plan that never changes, records that grow line by line, and claims on the work that is left.

Any number of processes may work on one study, also on machines that share the folder by a file system with flock. A
claim is a lock that the kernel releases when its process ends, so what a dead process has left is free at once.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from quern import __version__
from quern.machine import Machine
from quern.process import to_stderr
from quern.records import append_synced, drop_torn_end, git_hash, read_json, strict
from quern.runs.origin import flat
from quern.temporaries import alone_in, write_whole

FIXED = {"device": "--device", "dtype": "--dtype", "compiled": "--compile"}
"""Facts of the machine that change the numbers, and the flags that set them."""
WAIT_SECONDS = 1.0
Job = TypeVar("Job")


def now() -> str:
    """The time as ISO 8601 text."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def start_facts(machine: Machine, command: str) -> dict[str, Any]:
    """The facts of a start, for the records: time, versions, machine. command: the command line."""
    return {
        "command": command,
        "registered": now(),
        "quern": __version__,
        "commit": git_hash(Path(__file__).parent),
        "machine": machine.describe(),
    }


def data_names(data: str) -> str:
    """Returns the names in a recipe's `data` (one per line), without their folders, joined by commas."""
    return ", ".join(Path(name).name for name in data.split("\n"))


class Study:
    """An open study."""

    PLAN = "study.json"
    """The file of the plan: what must not change, and the facts of the first start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / self.PLAN).is_file():
            raise ValueError(f"there is no study in {folder}: train it first")
        self.body = read_json(folder / self.PLAN, dict[str, Any])
        self.refresh()

    @classmethod
    def register(cls, folder: Path, plan: Mapping[str, Any]) -> Self:
        """Opens a study, and writes its plan if it is new. Raises ValueError if it has another plan."""
        with alone_in(folder, to_stderr):
            if not (folder / cls.PLAN).exists():
                write_whole(folder / cls.PLAN, json.dumps(strict(plan), indent=1, allow_nan=False) + "\n")
        study = cls(folder)
        study.compare_plan(plan)
        return study

    def compare_plan(self, plan: Mapping[str, Any]) -> None:
        """Raises ValueError if the study has another plan; the facts of the first start may differ."""
        old, new = (flat(body | {"facts": None}) for body in (self.body, strict(plan)))
        if changed := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
            raise ValueError(
                f"the study {self.name} was registered with another {', '.join(changed)}, which must not change after "
                "the first run: give the same arguments, or name another study with --study"
            )

    def compare_facts(self, facts: dict[str, Any] | None, log: Callable[[str], None]) -> None:
        """Logs a warning if other code or another PyTorch made the first start. Raises ValueError if the device, the
        dtype or the use of torch.compile differ. facts: facts of this start; None if they are unknown."""
        before = self.body["facts"]
        if before is None or facts is None:
            return
        old, new = (one | one["machine"] for one in (before, facts))
        fixed = [f"{flag} ({old[key]} then, {new[key]} now)" for key, flag in FIXED.items() if old[key] != new[key]]
        if fixed:
            raise ValueError(f"study '{self.name}' began with {', '.join(fixed)}: give the same, or another --study")
        pairs = [(key, old.get(key), new.get(key)) for key in ("quern", "commit", "torch")]
        if changed := [f"{key} {one} then, {other} now" for key, one, other in pairs if one != other]:
            log(f"warning: the study '{self.name}' was started by other software: {'; '.join(changed)}")

    @property
    def name(self) -> str:
        return self.folder.name

    def refresh(self) -> None:
        """Reads the records again, which other processes may have extended."""

    def add(self, file: str, body: Mapping[str, Any]) -> None:
        """Appends a line to one of the study's files, waits until it is on the disk, and reads the records again."""
        with alone_in(self.folder, to_stderr):
            drop_torn_end(self.folder / file)
            append_synced(self.folder / file, strict(body))
        self.refresh()

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Holds a claim for the length of the block. Yields whether this process got it."""
        folder = self.folder / "claims"
        folder.mkdir(exist_ok=True)
        with (folder / name).open("a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            self.refresh()
            yield True

    def work(self, wanted: Callable[[], Sequence[Job]], claim: Callable[[Job], str], do: Callable[[Job], None]) -> None:
        """Does one job after another, beside other processes, until none is wanted. wanted: lists the jobs that the
        records lack now, those that others do included; claim: names a job's claim."""
        while jobs := wanted():
            for job in jobs:
                with self.claim(claim(job)) as mine:
                    if mine and job in wanted():
                        do(job)
                        break
            else:
                time.sleep(WAIT_SECONDS)  # other processes do all of them
                self.refresh()
