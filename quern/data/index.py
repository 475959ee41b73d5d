"""Index: where each document of a corpus begins, and how long it is, in tokens. It reads no token.

`ArrayIndex` has both in memory, in any order. `FileIndex` reads them when they are asked for, from an array for each
file, so that a corpus of 10⁸ documents needs no memory for those that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

Spans = tuple[np.ndarray, np.ndarray]
"""(starts, lengths) of some documents, each (documents,) int64; starts are counted over all files."""


class Index(Protocol):
    """documents: their number; tokens: of all documents, BOS included."""

    @property
    def documents(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def span(self, first: int, last: int) -> Spans:
        """The documents `first` to `last` - 1."""
        ...

    def take(self, documents: np.ndarray) -> Spans:
        """The documents with these indices."""
        ...

    def tokens_of(self, first: int, last: int) -> int:
        """Tokens of the documents `first` to `last` - 1."""
        ...


class ArrayIndex:
    """An index in memory. starts, lengths: as `Spans`."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.starts, self.lengths = starts, lengths

    @property
    def documents(self) -> int:
        return len(self.starts)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def span(self, first: int, last: int) -> Spans:
        return self.starts[first:last], self.lengths[first:last]

    def take(self, documents: np.ndarray) -> Spans:
        return self.starts[documents], self.lengths[documents]

    def tokens_of(self, first: int, last: int) -> int:
        return int(self.lengths[first:last].sum())


class IndexedFile(Protocol):
    """A file of documents. count, documents: its tokens and documents; skipped: tokens before its first document."""

    @property
    def count(self) -> int: ...

    @property
    def documents(self) -> int: ...

    @property
    def skipped(self) -> int: ...

    def starts(self) -> np.ndarray:
        """(documents,) int64, rising: the index in the file of the first token of each document."""
        ...


class FileIndex:
    """The index of consecutive files, which asks a file for its starts whenever they are needed."""

    def __init__(self, files: Sequence[IndexedFile]) -> None:
        self._files = list(files)
        self._bases = np.cumsum([0] + [file.count for file in files])
        self._firsts = np.cumsum([0] + [file.documents for file in files])
        self._tokens = np.cumsum([0] + [file.count - file.skipped for file in files])

    @property
    def documents(self) -> int:
        return int(self._firsts[-1])

    @property
    def tokens(self) -> int:
        return int(self._tokens[-1])

    def span(self, first: int, last: int) -> Spans:
        return self.take(np.arange(first, min(last, self.documents)))

    def take(self, documents: np.ndarray) -> Spans:
        documents = np.asarray(documents, dtype=np.int64)
        if documents.size and not 0 <= documents.min() <= documents.max() < self.documents:
            raise IndexError(f"the documents are numbered 0 to {self.documents - 1:,}")
        which = np.searchsorted(self._firsts, documents, side="right") - 1
        order = np.argsort(which, kind="stable")
        starts, ends = np.empty((2, len(documents)), dtype=np.int64)
        for at in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
            if not at.size:
                continue
            number = int(which[at[0]])
            file, base = self._files[number], self._bases[number]
            own, local = file.starts(), documents[at] - self._firsts[number]
            starts[at] = own[local] + base
            following = np.minimum(local + 1, file.documents - 1)
            ends[at] = np.where(local + 1 < file.documents, own[following], file.count) + base
        return starts, ends - starts

    def tokens_of(self, first: int, last: int) -> int:
        return self._tokens_before(last) - self._tokens_before(first)

    def _tokens_before(self, document: int) -> int:
        """Tokens of all documents before this one."""
        number = min(int(np.searchsorted(self._firsts, document, side="right")) - 1, len(self._files) - 1)
        file, local = self._files[number], document - int(self._firsts[number])
        if local in (0, file.documents):
            return int(self._tokens[number + (local > 0)])
        return int(self._tokens[number]) + int(file.starts()[local]) - file.skipped
