"""Temporary files and folders, which are removed even if the process that made them is killed.

A temporary name is `.<final name>.tmp-<id>`. The owner holds an flock on it (on the file `lock` in a folder) until it
exits, and the kernel releases the lock in any case. A temporary that can be locked therefore has no owner, and
`remove_abandoned` deletes it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import platform
import shlex
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from quern.process import waiting

LOCK = "lock"
NAMES = "backslashreplace"
"""The bytes of a file name that are no UTF-8 are surrogates in a text; JSON reads these escapes as the same ones."""


@contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """A locked folder beside `final`, whose parent exists, for the body. Removes such folders of killed processes."""
    remove_abandoned(final.parent, final.name)
    path, lock = _temporary(final, folder=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.close()


def scratch_folder() -> AbstractContextManager[Path]:
    """A `temporary_folder` in the system's temporary folder."""
    return temporary_folder(Path(tempfile.gettempdir()) / "quern")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The body writes the temporary file that it is given, which is synced and renamed to `path` when the body ends.

    Creates the folder, and removes temporaries of killed writers of the same file. An error in the body, or an OSError
    in writing, keeps the previous version.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, path.name)
    temporary, lock = _temporary(path)
    try:
        with lock, naming(path):
            yield temporary
            sync_path(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically: `whole_file` with this text."""
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8", errors=NAMES) as file:
        file.write(text)


@contextmanager
def alone_in(folder: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Runs the body in one process at a time, by a lock in the folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder), open(folder / ".lock", "a+", encoding="utf-8", errors=NAMES) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            with waiting(f"{lock.read() or 'another process'}, which writes to {folder}", log=log):
                fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(holder())
        lock.flush()
        yield


def holder(command: str = "") -> str:
    """Names this process, in a lock that it holds. command: its command line; by default, the one that Python got."""
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    command = command or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"process {os.getpid()} on {platform.node()} since {since} (`{command}`)"


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Removes temporaries in a folder, if it exists, whose owners have exited. name: name of their path; None: any."""
    for path in folder.glob(f".{'*' if name is None else glob.escape(name)}.tmp-*"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            with open(path / LOCK if path.is_dir() else path, "a", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            continue  # owned by a live process, already removed, or another user's


def remove_whole(folder: Path) -> None:
    """Removes a folder, whose name is free before its first file goes; also the rest of removals that were killed. Of a
    link, removes the folder that it links to, then the link."""
    if folder.is_symlink():
        remove_whole(folder.resolve())
        return folder.unlink()
    remove_abandoned(folder.parent, folder.name)
    gone = _temporary_name(folder)
    folder.rename(gone)
    shutil.rmtree(gone)


def sync_path(path: Path) -> None:
    """Writes a file, or the list of files of a folder, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary_name(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp-{uuid.uuid4().hex[:12]}")  # sockets have short paths


def _temporary(final: Path, folder: bool = False) -> tuple[Path, TextIO]:
    """Creates and locks a temporary file or folder beside `final`."""
    while True:  # `remove_abandoned` of another process may remove it before the lock
        path = _temporary_name(final)
        if folder:
            path.mkdir(0o700)
        try:
            file = open(path / LOCK if folder else path, "w", encoding="utf-8")  # noqa: SIM115
        except FileNotFoundError:
            if not folder:  # its own folder is gone, or makes no files
                raise
            continue
        fcntl.flock(file, fcntl.LOCK_EX)
        if Path(file.name).exists():
            return path, file
        file.close()


# Errors of the operating system, in words -----------------------------------------------------------------------------


OTHER = "or choose another place"
INSTEAD = {
    errno.EROFS: "choose a place on another disk",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"make it readable and writable, {OTHER}"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"make room there, {OTHER}"),
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""The advice for each error of the operating system."""


def plainly(error: BaseException) -> str:
    """An error's message. For an OSError ([Errno 30] …): the path, the reason and the advice."""
    if isinstance(error, MemoryError | RecursionError):
        return f"a file or a value is too large or too deep for this machine ({error or 'no memory is left'})"
    if not isinstance(error, OSError) or error.strerror is None or error.errno is None:
        return str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror}: {INSTEAD.get(error.errno, f'check the path, {OTHER}')}"


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Gives an OSError this path if it names no file, as that of a full disk, or names the path's temporary file."""
    try:
        yield
    except OSError as error:
        own = error.filename is None or f".{Path(path).name}.tmp-" in str(error.filename)
        if own and error.strerror is not None:
            error.filename = str(path)
        raise
