"""Opens the storage of a sweep: a journal file, SQLite or PostgreSQL.

The journal survives the death of its writers at any moment. Its lock is an flock, which the kernel releases when the
holder dies (Optuna's own lock files block all others for 30 s then). Whoever takes the lock first removes a torn last
line, because the next append would otherwise make the journal unreadable. A network file system must support flock
(NFSv4 does).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from quern.temporaries import take_turn

DATABASES = ("sqlite", "postgresql")
SQLITE_WAIT_SECONDS = 60


class KernelLock(JournalFileOpenLock):
    """An flock on a file beside the journal."""

    def __init__(self, journal: str) -> None:
        super().__init__(journal)
        self._journal = journal
        self._held: TextIO | None = None

    def acquire(self) -> bool:
        self._held = open(f"{self._journal}.lock", "a+", encoding="utf-8")  # noqa: SIM115
        take_turn(self._held, f"writes to {self._journal}")
        _drop_torn_end(self._journal)
        return True

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
        self._held = None


def open_storage(where: str) -> BaseStorage:
    """Opens a storage, and makes a new one if needed.

    Args:
        where: The path of a journal file, or the URL of a database: sqlite:///PATH, postgresql://USER@HOST/NAME.

    Raises:
        ValueError: The URL is of another kind.
        ImportError: The database's driver is missing.
    """
    scheme, is_url, _ = where.partition("://")
    if not is_url:
        Path(where).parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(where, lock_obj=KernelLock(where)))
    if scheme.partition("+")[0] not in DATABASES:
        raise ValueError(f"--storage cannot be {where}: use a file, sqlite:///PATH or postgresql://USER@HOST/NAME")
    local = {"connect_args": {"timeout": SQLITE_WAIT_SECONDS}} if scheme.startswith("sqlite") else {}
    if scheme == "postgresql":  # SQLAlchemy 2.0 and 2.1 have different default drivers
        where = where.replace("postgresql", "postgresql+psycopg", 1)
    try:
        return RDBStorage(where, engine_kwargs={"pool_pre_ping": True, **local})
    except ImportError as error:
        raise ImportError(f"{scheme} needs a driver ({error}): run .venv/bin/pip install 'psycopg[binary]'") from error


def _drop_torn_end(journal: str) -> None:
    """Cuts the journal after its last newline."""
    with open(journal, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
            end = start
        if end < size:
            file.truncate(end)
