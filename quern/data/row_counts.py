"""Row counts: how many rows each chunk of a loader has, in reading order. They find the chunk of any row.

A chunk has to be packed before its rows are known. The counts are kept in a file beside the shards, so that a resumed
run does not pack again what came before it. The file may be removed: the counts are then found again by packing. A
file that is not whole, or of another seed, packer, context or version, is not used.
"""

from __future__ import annotations

import hashlib
import warnings
from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np

from quern.temporaries import whole_file

SAVE_EVERY = 16
"""Chunks between two versions of the file: about a second of packing."""
DIGEST_BYTES = 32


class RowCounts:
    """Row counts in reading order. The groups of all epochs take turns, numbered from 0, and a group has chunks.

    Args:
        path: The file; None keeps the counts in memory only. Several processes may write it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        # Of each chunk: the turn of its group, and the rows up to its end.
        self._turns, self._ends = ([], []) if path is None else _read(path)
        self._saved = len(self._ends)

    @property
    def total(self) -> int:
        """Rows of all chunks that are known."""
        return self._ends[-1] if self._ends else 0

    @property
    def last(self) -> tuple[int, int]:
        """(turn, chunk in the group) of the last known chunk; (0, -1) before the first."""
        turn = self._turns[-1] if self._turns else 0
        return turn, len(self._turns) - bisect_left(self._turns, turn) - 1

    def append(self, turn: int, rows: int) -> None:
        """Adds the next chunk."""
        self._turns.append(turn)
        self._ends.append(self.total + rows)
        if self.path is not None and len(self._ends) >= self._saved + SAVE_EVERY:
            self._save(self.path)

    def find(self, row: int) -> tuple[int, int, int, int]:
        """The chunk of a row below `total`: its turn, its number in the group, its first row, and its end."""
        at = bisect_right(self._ends, row)
        turn = self._turns[at]
        return turn, at - bisect_left(self._turns, turn), self._ends[at - 1] if at else 0, self._ends[at]

    def rows_before(self, turn: int) -> int:
        """Rows of all turns before this one, whose chunks are all known."""
        at = bisect_left(self._turns, turn)
        return self._ends[at - 1] if at else 0

    def _save(self, path: Path) -> None:
        self._saved = len(self._ends)
        body = np.array([self._turns, self._ends], dtype="<i8").tobytes()
        try:
            if len(_read(path)[1]) < len(self._ends):  # other ranks write it too
                with whole_file(path) as temporary:
                    temporary.write_bytes(hashlib.sha256(body).digest() + body)
        except OSError as error:
            self.path = None
            warnings.warn(f"{path} cannot be written ({error}): a resumed run will pack its text again", stacklevel=2)


def _read(path: Path) -> tuple[list[int], list[int]]:
    """The turns and the ends in a file; none if it is missing or not whole."""
    raw = path.read_bytes() if path.is_file() else b""
    body = raw[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != raw[:DIGEST_BYTES]:
        return [], []
    turns, ends = np.frombuffer(body[: len(body) // 16 * 16], dtype="<i8").reshape(2, -1)
    sound = (turns >= 0).all() and (np.diff(turns) >= 0).all() and (np.diff(ends, prepend=0) >= 0).all()
    return (turns.tolist(), ends.tolist()) if sound else ([], [])
