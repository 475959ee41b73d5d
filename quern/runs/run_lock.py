"""One process at a time writes to a run: an exclusive lock on a file beside the run's folder.

The kernel holds the lock (flock) and releases it when the process ends for any reason, so no lock is ever stale. The
lock file names the holder. It is never removed: else a process could lock a file that another one no longer finds.
Readers (chat, serve, report, evaluate) take no lock. With several ranks, rank 0 takes it. A network file system must
support flock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from quern.runs.run_dir import RunDir
from quern.temporaries import NAMES, holder

if TYPE_CHECKING:
    from quern.mesh import Mesh


class RunInUseError(ValueError):
    """Another process writes to the run; the message names it."""


@contextmanager
def run_lock(run_dir: RunDir, command: str, mesh: Mesh | None = None) -> Iterator[None]:
    """Holds the run's lock while the body runs; on a mesh, rank 0 takes it. Raises RunInUseError if another holds it.

    command: The command of this process, for the message that another process gets.
    """
    if mesh is not None and not mesh.main:
        yield
        return
    _refuse_broken_link(run_dir.folder)
    run_dir.lock.parent.mkdir(parents=True, exist_ok=True)
    with open(run_dir.lock, "a", encoding="utf-8", errors=NAMES) as lock:
        while not _taken(lock):
            refuse_in_use(run_dir)  # passes where the other process has ended since, or only looked at the lock
        lock.truncate(0)
        lock.write(holder(command))
        lock.flush()
        yield


def refuse_in_use(run_dir: RunDir) -> None:
    """Raises RunInUseError if a process holds the run's lock."""
    if who := run_dir.holder:
        raise RunInUseError(
            f"run '{run_dir.run}' is in use by {who}: wait until it ends, stop it, or name another run with --run"
        )


def _taken(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_broken_link(folder: Path) -> None:
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(
                f"{path} links to {os.readlink(path)}, which is not there: put that back (is its disk mounted?), or "
                "remove the link"
            )
