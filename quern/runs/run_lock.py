"""One process at a time writes to a run: an exclusive lock on the run's folder.

The kernel holds the lock (flock) and releases it when the process ends for any reason, so no lock is ever stale. The
lock file names the holder. Readers (chat, serve, report, evaluate) take no lock. With several ranks, rank 0 takes it. A
network file system must support flock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quern.runs.run_dir import LOCK, RunDir, holder_in
from quern.temporaries import NAMES, holder, naming

if TYPE_CHECKING:
    from quern.mesh import Mesh

MOST_TRIES = 1000
OTHER_RUN = ", or name another run with --run"
LOOK_SECONDS = 0.005
"""More than `RunDir.holder` takes to look at a lock."""


class RunInUseError(ValueError):
    """Another process writes to the run; the message names it."""


@contextmanager
def run_lock(run_dir: RunDir, command: str, mesh: Mesh | None = None, instead: str = OTHER_RUN) -> Iterator[None]:
    """Holds the run's lock while the body runs; on a mesh, rank 0 takes it. Raises RunInUseError if another holds it.

    command: The command of this process, for the message that another process gets; instead: the end of this one's,
    if it is refused.
    """
    if mesh is not None and not mesh.main:
        yield
        return
    path = run_dir.folder / LOCK
    folders = [folder for folder in (run_dir.folder, run_dir.folder.parent, run_dir.out) if not folder.exists()]
    held = _acquire(path, run_dir.run, instead)
    try:
        with naming(path):
            os.ftruncate(held, 0)
            os.pwrite(held, holder(command).encode("utf-8", NAMES), 0)
        yield
    finally:
        if _is_at(held, path) and os.listdir(path.parent) == [LOCK]:  # the body wrote nothing: leave no empty run
            path.unlink()
            with suppress(OSError):  # another process may already use one of them
                for folder in folders:
                    folder.rmdir()
        os.close(held)


def refuse_in_use(run_dir: RunDir, instead: str = OTHER_RUN) -> None:
    """Raises RunInUseError if a process holds the run's lock. instead: as for `run_lock`."""
    if who := run_dir.holder:
        raise RunInUseError(_in_use(run_dir.run, who, instead))


def _in_use(run: str, who: str, instead: str) -> str:
    return f"run '{run}' is in use by {who}: wait until it ends, or stop it{instead}"


def _is_at(held: int, path: Path) -> bool:
    """Whether the file is at its path, and no other process has removed or moved it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(held), os.stat(path))
    return False


def _acquire(path: Path, run: str, instead: str) -> int:
    """Opens and locks the file. Opens it again if another process removed it before the lock was taken."""
    looked, tries = False, 0
    while True:
        tries += 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileNotFoundError, FileExistsError):
            if broken := next((one for one in (path, *path.parents) if one.is_symlink() and not one.exists()), None):
                raise FileNotFoundError(
                    f"{broken} links to {os.readlink(broken)}, which is not there: put that back (is its disk "
                    "mounted?), or remove the link"
                ) from None
            if tries == MOST_TRIES or path.parent.exists() and not path.parent.is_dir():
                raise
            continue  # another process removed the folder
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = holder_in(held)
            os.close(held)
            if not looked:
                looked = True
                time.sleep(LOOK_SECONDS)
                continue
            raise RunInUseError(_in_use(run, who, instead)) from error
        if _is_at(held, path):
            return held
        os.close(held)
