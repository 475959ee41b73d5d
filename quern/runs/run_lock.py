"""One process at a time writes to a run: an exclusive lock beside the run's folder.

The kernel holds the lock (flock) and releases it when the process ends for any reason, so no lock is ever stale. The
lock file names the holder. Readers (chat, serve, report, evaluate) take no lock. With several ranks, rank 0 takes it. A
network file system must support flock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from quern.runs.run_dir import RunDir
from quern.temporaries import locked

if TYPE_CHECKING:
    from quern.mesh import Mesh

OTHER_RUN = ", or name another run with --run"


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
    folder = run_dir.folder
    if broken := next((one for one in (folder, *folder.parents) if one.is_symlink() and not one.exists()), None):
        raise FileNotFoundError(
            f"{broken} links to {os.readlink(broken)}, which is not there: put that back (is its disk mounted?), or "
            "remove the link"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(run_dir.lock, partial(refuse, run_dir, instead), command):
        folder.mkdir(exist_ok=True)  # `quern runs` lists the run from now on
        try:
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()  # if the body wrote nothing: leave no empty run


def refuse_in_use(run_dir: RunDir, instead: str = OTHER_RUN) -> None:
    """Raises RunInUseError if a process holds the run's lock. instead: as for `run_lock`."""
    if who := run_dir.holder:
        refuse(run_dir, instead, who)


def refuse(run_dir: RunDir, instead: str, who: str) -> NoReturn:
    raise RunInUseError(f"run '{run_dir.run}' is in use by {who}: wait until it ends, or stop it{instead}")
