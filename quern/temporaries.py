"""Temporary files and folders that a killed process cannot leave behind for ever.

A temporary name is `.<final name>.tmp-<id>`. Its owner holds an flock on it (on the file `lock` in a folder) for as
long as it lives, and the kernel releases that lock however the owner ends. So a temporary that can be locked belongs to
nobody, and `remove_abandoned` deletes it at once, while those of living processes stay.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from pathlib import Path
from typing import TextIO

LOCK = "lock"


class TemporaryFolder:
    """A new, locked folder beside `final`; `remove` deletes it and releases the lock.

    Args:
        final: The path that the contents are for; its parent exists.
    """

    def __init__(self, final: Path) -> None:
        while True:
            self.path = _temporary_name(final)
            self.path.mkdir()
            try:
                self._lock = _locked(self.path / LOCK)
                return
            except FileNotFoundError:
                continue  # `remove_abandoned` of another process was quicker than the lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def write_whole(path: Path, text: str) -> None:
    """Writes a UTF-8 file that appears whole or not at all, and removes what killed writers of it left.

    Args:
        path: The file; its folder is created.
        text: The contents.

    Raises:
        OSError: The file cannot be written; the previous one, if any, is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, path.name)
    while True:
        temporary = _temporary_name(path)
        try:
            file = _locked(temporary)
            break
        except FileNotFoundError:
            continue
    try:
        with file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_abandoned(folder: Path, name: str = "*") -> None:
    """Removes the temporaries in a folder whose owners have ended.

    Args:
        folder: Where to look; subfolders are left alone. It need not exist.
        name: The final name, or a pattern of it.
    """
    for path in folder.glob(f".{name}.tmp-*"):
        try:
            with open(path / LOCK if path.is_dir() else path, "a", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            continue  # its owner is alive, it has gone meanwhile, or it is another user's


def _temporary_name(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp-{uuid.uuid4().hex}")


def _locked(path: Path) -> TextIO:
    """A new file, locked. FileNotFoundError where it was removed between its creation and the lock."""
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    if not path.exists():
        file.close()
        raise FileNotFoundError(path)
    return file
