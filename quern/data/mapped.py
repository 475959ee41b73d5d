"""Token files that are mapped into memory when they are read, within bounds on memory and open files."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import numpy as np

from quern.data.token_file import TokenFile, TokenMap

FAULT_BYTES = 2 << 20
"""Memory that one access to a map may load at most: Linux maps up to one large folio."""
FILES_MAPPED = 64
"""Files that stay mapped. Each needs an open file, of which a process may have about a thousand."""


class MappedFiles:
    """The tokens of consecutive files.

    Args:
        files: The files, in order.
        resident_bytes: Most bytes of them that stay in memory (an upper estimate).
    """

    def __init__(self, files: Sequence[TokenFile], resident_bytes: int = 1 << 30) -> None:
        self.files: list[TokenFile] = []
        self.extend(files)
        self.resident_bytes = resident_bytes
        self.masked = all(file.masked for file in files)
        self._maps: dict[int, TokenMap] = {}  # by the number of the file; the one that was read last is at the end
        self._touched_bytes = 0
        self._lock = threading.Lock()

    def extend(self, files: Sequence[TokenFile]) -> None:
        """Adds files at the end; other threads may read those before."""
        self.files += files
        self._bases = np.cumsum([0] + [file.count for file in self.files])

    @property
    def count(self) -> int:
        """Tokens of all files."""
        return int(self._bases[-1])

    def copy(
        self, field: Literal["tokens", "mask"], out: np.ndarray, at: np.ndarray, source: np.ndarray, length: np.ndarray
    ) -> None:
        """Copies many slices: out[at:at + length] = field[source:source + length] for each entry.

        Args:
            field: What is copied.
            out: Flat, int32 for tokens and bool for masks.
            at, source, length: (slices,) int64. `source` is an index over all files; a slice is in one file.
        """
        part = np.searchsorted(self._bases, source, side="right") - 1
        local = source - self._bases[part]
        mapped, array = -1, out
        for which, frm, to, count in zip(part.tolist(), local.tolist(), at.tolist(), length.tolist(), strict=True):
            if which != mapped:
                mapped, array = which, attrgetter(field)(self._map(which))
            out[to : to + count] = array[frm : frm + count]
        self._touched_bytes += len(source) * FAULT_BYTES
        if self._touched_bytes > self.resident_bytes:
            self._touched_bytes = 0
            if sum(held.mapped_bytes for held in self._mapped()) > self.resident_bytes:
                self.release()

    def release(self) -> None:
        """Frees the mapped pages, so that large files do not fill the memory. They stay readable."""
        for held in self._mapped():
            for mapped in held.maps if hasattr(mmap, "MADV_DONTNEED") else ():
                mapped.madvise(mmap.MADV_DONTNEED)

    def _mapped(self) -> list[TokenMap]:
        with self._lock:
            return list(self._maps.values())

    def _map(self, which: int) -> TokenMap:
        """Maps a file, and unmaps the one that was not read for longest if there are too many."""
        with self._lock:
            self._maps[which] = held = self._maps.pop(which, None) or self.files[which].map()
            if len(self._maps) > FILES_MAPPED:
                del self._maps[next(iter(self._maps))]
            return held
