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

    def size_before(self, document: int, each: int = 0) -> int:
        """Tokens of all documents before this one, and `each` more for each of them."""
        ...

    def at_size(self, size: int, each: int) -> int:
        """The first document with `size_before` ≥ `size`; the number of documents if there is none."""
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

    def size_before(self, document: int, each: int = 0) -> int:
        return int(self.lengths[:document].sum()) + each * document

    def at_size(self, size: int, each: int) -> int:
        sizes = self.lengths + each
        return int(np.searchsorted(np.cumsum(sizes) - sizes, size, side="left"))


class IndexedFile(Protocol):
    """A file that begins with a document. count, documents: its tokens and documents."""

    @property
    def count(self) -> int: ...

    @property
    def documents(self) -> int: ...

    def starts(self) -> np.ndarray:
        """(documents,) int64, rising: the index in the file of the first token of each document."""
        ...


class FileIndex:
    """The index of consecutive files, which asks a file for its starts whenever they are needed."""

    def __init__(self, files: Sequence[IndexedFile]) -> None:
        self._files: list[IndexedFile] = []
        self.extend(files)

    def extend(self, files: Sequence[IndexedFile]) -> None:
        """Adds files at the end; other threads may read those before."""
        self._files += files
        self._bases = np.cumsum([0] + [file.count for file in self._files])
        self._firsts = np.cumsum([0] + [file.documents for file in self._files])

    @property
    def documents(self) -> int:
        return int(self._firsts[-1])

    @property
    def tokens(self) -> int:
        return int(self._bases[-1])

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

    def size_before(self, document: int, each: int = 0) -> int:
        number = int(np.searchsorted(self._firsts, document, side="right")) - 1
        local = document - int(self._firsts[number])
        inside = int(self._files[number].starts()[local]) if local else 0
        return int(self._bases[number]) + inside + each * document

    def at_size(self, size: int, each: int) -> int:
        number = int(np.searchsorted(self._bases + each * self._firsts, size, side="right")) - 1
        if number == len(self._files):
            return self.documents
        file, first = self._files[number], int(self._firsts[number])
        left = size - int(self._bases[number]) - each * first
        sizes = file.starts() + each * np.arange(file.documents)
        return first + int(np.searchsorted(sizes, left, side="left"))
