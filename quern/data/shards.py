"""The Corpus: documents of token ids, read from memory-mapped files or from memory.

A corpus has parts, each the tokens of some documents end to end and where they start. Of files, tokens and starts are
mapped when they are read, so a corpus of 10⁸ documents takes no memory for those that nobody reads. token_file.py has
the format of prepared shards, bin_files.py reads the files of other programs. Errors name the damaged file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.token_file import AGAIN, check, map_tokens, read_manifest, shard_files

Spans = tuple[np.ndarray, np.ndarray]
"""(starts, lengths) of some documents, each (documents,) int64; starts are counted over all parts."""
VERIFIED_BYTES = 1 << 28
"""Bytes that are hashed when a corpus is opened; a large one would take minutes."""
FAULT_BYTES = 2 << 20
"""Memory that one access to a map may load at most: Linux maps up to one large folio."""
FILES_MAPPED = 64
"""Files that stay mapped. Each needs an open file, of which a process may have about a thousand."""


@dataclass(frozen=True, eq=False)
class Part:
    """Documents end to end, in memory or in a file that is mapped when it is read."""

    count: int  # tokens
    documents: int
    starts: Callable[[], np.ndarray]  # (documents,) int64, the index of the first token of each; 0 is the first
    read: Callable[[], tuple[np.ndarray, np.ndarray | None]]  # the tokens, and a mask, True where one is learned
    masked: bool = False
    mapped_bytes: int = 0  # size of the files that `read` maps
    skipped: int = 0  # tokens of the file that belong to no document


def _shard(folder: Path, entry: dict[str, Any], dtype: str) -> Part:
    """A prepared shard. Sizes and the header are checked here, the hash of each file once, before it is read."""
    count, documents, mask = entry["tokens"], entry["documents"], entry.get("mask")
    for file in shard_files(entry):
        check(folder, file, verify=False)
    tokens = map_tokens(folder / entry["name"])
    if tokens.dtype.name != dtype or len(tokens) != count or mask and mask["bytes"] != count:
        raise ValueError(f"{folder / entry['name']} does not match the manifest; {AGAIN}")

    @cache
    def checked(kind: str) -> Path:
        return check(folder, entry[kind] if kind else entry, verify=True)

    @cache
    def index() -> Path:
        path = checked("starts")
        try:
            starts = np.load(path, mmap_mode="r", allow_pickle=False)
            sound = starts.shape == (documents,) and starts.dtype == np.int64 and starts[0] == 0
            sound = sound and bool((np.diff(starts, append=count) > 0).all())
        except (ValueError, EOFError):
            sound = False
        if not sound:
            raise ValueError(f"{path} does not match {entry['name']}; {AGAIN}")
        return path

    def read() -> tuple[np.ndarray, np.ndarray | None]:
        learned = np.memmap(checked("mask"), dtype=bool, mode="r").view(np.ndarray) if mask else None
        return map_tokens(checked("")), learned

    mapped = entry["bytes"] + (mask["bytes"] if mask else 0)
    return Part(count, documents, lambda: np.load(index(), mmap_mode="r"), read, bool(mask), mapped)


class Corpus:
    """Documents of token ids.

    Args:
        bos: The id that every document starts with.
        spans: The documents of the parts that the corpus has, in their order; None for all.
    """

    resident_bytes = 1 << 30
    """Most bytes of mapped files that stay in memory (an upper estimate)."""

    def __init__(self, parts: Sequence[Part], bos: int, spans: Spans | None = None) -> None:
        self.parts, self.bos = parts, bos
        self.masked = all(part.masked for part in parts)
        self.skipped_tokens = sum(part.skipped for part in parts)
        self._chosen = spans
        self._firsts = np.cumsum([0] + [part.documents for part in parts])
        self._bases = np.cumsum([0] + [part.count for part in parts])
        self._read = lru_cache(FILES_MAPPED)(lambda number: parts[number].read())
        self._touched_bytes = 0

    @classmethod
    def open(cls, folder: str | Path, split: str, *, fingerprint: str | None = None) -> Corpus:
        """Opens a split of a prepared folder and checks it against the manifest. Files beyond the first
        `VERIFIED_BYTES` are hashed when they are first read.

        Raises FileNotFoundError or ValueError, which names it, for a file that is missing, damaged or of another
        fingerprint than the one that is given.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if fingerprint is not None and manifest["fingerprint"] != fingerprint:
            raise ValueError(f"{folder} was made from another tokenizer or source; prepare it again")
        if split not in manifest["splits"]:
            there = ", ".join(manifest["splits"]) or "none"
            raise ValueError(f"{folder} has no split {split!r} (there: {there}); prepare it again")
        entry = manifest["splits"][split]
        parts = [_shard(folder, file, entry["dtype"]) for file in entry["files"]]
        before = np.cumsum([0] + [part.mapped_bytes for part in parts])
        for part in parts[: np.searchsorted(before, VERIFIED_BYTES)]:
            part.starts()
            part.read()
        return cls(parts, entry["bos"])

    @classmethod
    def join(cls, corpora: Sequence[Corpus]) -> Corpus:
        """The documents of several corpora of one tokenizer, in order. It shares the tokens."""
        bases = np.cumsum([0] + [corpus._bases[-1] for corpus in corpora])
        starts = np.concatenate([corpus.starts + base for corpus, base in zip(corpora, bases, strict=False)])
        lengths = np.concatenate([corpus.lengths for corpus in corpora])
        return cls([part for corpus in corpora for part in corpus.parts], corpora[0].bos, spans=(starts, lengths))

    def part(self, documents: np.ndarray) -> Corpus:
        """A corpus of the documents with these indices, each as often as it is named. It shares the tokens."""
        return Corpus(self.parts, self.bos, spans=self.take(documents))

    # Where documents are -------------------------------------------------------------------------------------------

    @property
    def num_documents(self) -> int:
        return int(self._firsts[-1]) if self._chosen is None else len(self._chosen[1])

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, BOS included."""
        return int(self._bases[-1] if self._chosen is None else self._chosen[1].sum())

    @cached_property
    def _spans(self) -> Spans:
        return self._chosen or self.take(np.arange(self.num_documents))

    @property
    def starts(self) -> np.ndarray:
        """(documents,) int64, index of the first token of each document, over all parts; kept in memory."""
        return self._spans[0]

    @property
    def lengths(self) -> np.ndarray:
        """(documents,) int64, tokens of each document with BOS; kept in memory."""
        return self._spans[1]

    def take(self, documents: np.ndarray) -> Spans:
        """Returns the positions of the documents with these indices."""
        documents = np.asarray(documents, dtype=np.int64)
        if documents.size and not 0 <= documents.min() <= documents.max() < self.num_documents:
            raise IndexError(f"the documents are numbered 0 to {self.num_documents - 1:,}")
        if self._chosen is not None:
            return self._chosen[0][documents], self._chosen[1][documents]
        which = np.searchsorted(self._firsts, documents, side="right") - 1
        order = np.argsort(which, kind="stable")
        starts, ends = np.empty((2, len(documents)), dtype=np.int64)
        for at in np.split(order, np.flatnonzero(np.diff(which[order])) + 1) if len(order) else []:
            number = int(which[at[0]])
            part, base = self.parts[number], self._bases[number]
            own, local = part.starts(), documents[at] - self._firsts[number]
            starts[at] = own[local] + base
            following = np.minimum(local + 1, part.documents - 1)
            ends[at] = np.where(local + 1 < part.documents, own[following], part.count) + base
        return starts, ends - starts

    def tokens_before(self, document: int) -> int:
        """Tokens of all documents before this one."""
        if self._chosen is not None:
            return int(self._chosen[1][:document].sum())
        return self.num_tokens if document == self.num_documents else int(self.take(np.array([document]))[0][0])

    def at_size(self, size: int, each: int) -> int:
        """The first document before which there are `size` tokens, where each document counts as `each` more; the
        number of documents if there is none."""
        return bisect_left(range(self.num_documents), size, key=lambda one: self.tokens_before(one) + each * one)

    # Their tokens --------------------------------------------------------------------------------------------------

    def gather(self, document: int, start: int = 0) -> np.ndarray:
        """The tokens of one document from `start` on, int32."""
        begin, tokens = self.take(np.array([document]))
        return self.slices(begin + start, tokens - start)

    def slices(self, source: np.ndarray, length: np.ndarray, mask: bool = False) -> np.ndarray:
        """Many slices end to end, int32; or their mask, bool. Arguments as for `copy`."""
        out = np.empty(int(length.sum()), dtype=np.bool_ if mask else np.int32)
        self.copy(out, np.cumsum(length) - length, source, length, mask)
        return out

    def copy(self, out: np.ndarray, at: np.ndarray, source: np.ndarray, length: np.ndarray, mask: bool = False) -> None:
        """Copies many slices: out[at:at + length] = tokens[source:source + length] for each entry.

        Args:
            out: Flat, int32 for tokens and bool for masks.
            at, source, length: (slices,) int64. `source` is an index over all parts; a slice is in one part.
            mask: Copies the mask, True where a token is learned, in place of the tokens. The corpus has masks.
        """
        numbers = np.searchsorted(self._bases[:-1], source, side="right") - 1  # an empty slice may begin at the end
        local = source - self._bases[numbers]
        mapped, array = -1, out
        for number, frm, to, count in zip(numbers.tolist(), local.tolist(), at.tolist(), length.tolist(), strict=True):
            if number != mapped:
                mapped, array = number, self._read(number)[mask]
                assert array is not None
            out[to : to + count] = array[frm : frm + count]
        self._touched_bytes += len(source) * FAULT_BYTES
        if self._touched_bytes > self.resident_bytes:
            self._touched_bytes = 0
            if sum(part.mapped_bytes for part in self.parts) > self.resident_bytes:
                self.release()

    def release(self) -> None:
        """Unmaps the files, so that a large corpus does not fill the memory. It stays readable."""
        self._read.cache_clear()
