"""The Corpus: documents of token ids, read from memory-mapped files or from memory.

A corpus has parts, each the tokens of some documents end to end and where they start. Of files, tokens and starts are
mapped when they are read, so a corpus of 10⁸ documents takes no memory for those that nobody reads. token_file.py has
the format of prepared shards, bin_files.py reads the files of other programs. Errors name the damaged file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.token_file import check, map_tokens, read_manifest

Spans = tuple[np.ndarray, np.ndarray]
"""(starts, lengths) of some documents, each (documents,) int64; starts are counted over all parts."""
VERIFIED_BYTES = 1 << 28
"""Bytes that are hashed when a corpus is opened; a large one would take minutes."""
FAULT_BYTES = 2 << 20
"""Memory that one access to a map may load at most: Linux maps up to one large folio."""
FILES_MAPPED = 64
"""Files that stay mapped. Each needs an open file, of which a process may have about a thousand."""


class Part:
    """Documents end to end in memory; subclasses map files.

    Args:
        tokens: (count,) ids.
        starts: (documents,) int64, the index of the first token of each document; 0 is the first.
        mask: (count,) bool, True where a token is to be learned; None if all are.
    """

    mapped_bytes = 0
    """Size of the files that `read` maps."""
    skipped = 0
    """Tokens of the file that belong to no document, and are not read."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None) -> None:
        self._arrays, self._starts = (tokens, mask), starts
        self.count, self.documents, self.masked = len(tokens), len(starts), mask is not None

    def starts(self) -> np.ndarray:
        """(documents,) int64, as given."""
        return self._starts

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens and their mask."""
        return self._arrays


class _Shard(Part):
    """A prepared shard. Each file is checked once, before it is read: the constructor looks at sizes and the header.

    entry, dtype: as the manifest has them; hashed: whether files are hashed.
    """

    def __init__(self, folder: Path, entry: dict[str, Any], dtype: str, hashed: bool) -> None:
        self.folder, self.entry, self.hashed = folder, entry, hashed
        self.count, self.documents, self.masked = int(entry["tokens"]), int(entry["documents"]), "mask" in entry
        self._index, self._tokens = entry["starts"], [entry, *([entry["mask"]] if self.masked else [])]
        self.mapped_bytes = sum(file["bytes"] for file in self._tokens)
        self._checked: set[str] = set()
        for file in (self._index, *self._tokens):
            check(folder, file, verify=False)
        tokens = map_tokens(folder / entry["name"])
        if tokens.dtype.name != dtype or len(tokens) != self.count:
            raise ValueError(f"{folder / entry['name']} does not match the manifest; prepare it again")

    def starts(self) -> np.ndarray:
        new = self._index["name"] not in self._checked
        path = self._check(self._index)
        try:
            starts = np.load(path, mmap_mode="r", allow_pickle=False)
            sound = starts.shape == (self.documents,) and starts.dtype == np.int64
        except (ValueError, EOFError):
            starts, sound = np.empty(0), False
        if new and not (sound and starts[0] == 0 and (np.diff(starts, append=self.count) > 0).all()):
            self._checked.remove(path.name)
            raise ValueError(f"{path} does not match {self.entry['name']}; prepare it again")
        return starts

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        path, *mask = map(self._check, self._tokens)
        masks = [np.memmap(path, dtype=bool, mode="r").view(np.ndarray) for path in mask]
        if masks and len(masks[0]) != self.count:
            raise ValueError(f"{mask[0]} has not one byte for each token; prepare the data again")
        return map_tokens(path), masks[0] if masks else None

    def _check(self, file: dict[str, Any]) -> Path:
        """The path of a file whose contents are as they were written."""
        if file["name"] not in self._checked:
            check(self.folder, file, self.hashed)
            self._checked.add(file["name"])
        return self.folder / file["name"]


class Corpus:
    """Documents of token ids.

    Args:
        bos: The id that every document starts with.
        fingerprint: Of the shards; None for other sources.
        cache: A folder where a loader may keep what it found out about the documents; None for other sources.
        spans: The documents of the parts that the corpus has, in their order; None for all.
    """

    resident_bytes = 1 << 30
    """Most bytes of mapped files that stay in memory (an upper estimate)."""

    def __init__(
        self,
        parts: Sequence[Part],
        bos: int,
        fingerprint: str | None = None,
        cache: Path | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.parts, self.bos, self.fingerprint, self.cache = parts, bos, fingerprint, cache
        self.masked = all(part.masked for part in parts)
        self.skipped_tokens = sum(part.skipped for part in parts)
        self._chosen = spans
        self._firsts = np.cumsum([0] + [part.documents for part in parts])
        self._bases = np.cumsum([0] + [part.count for part in parts])
        self._read = lru_cache(FILES_MAPPED)(lambda number: parts[number].read())
        self._touched_bytes = 0

    @classmethod
    def open(cls, folder: str | Path, split: str, *, fingerprint: str | None = None, verify: bool = True) -> Corpus:
        """Opens a split of a prepared folder and checks it against the manifest.

        Args:
            folder, split: As given to `ShardWriter`.
            fingerprint: The expected fingerprint; None accepts any.
            verify: Whether to check the hash of each file (about a second per GB), not only size and header. Files
                beyond the first `VERIFIED_BYTES` are hashed when they are first read.

        Raises:
            FileNotFoundError, ValueError: A file is missing, damaged, or has another fingerprint; the message
                names the file.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if fingerprint is not None and manifest["fingerprint"] != fingerprint:
            raise ValueError(f"{folder} was made from another tokenizer or source; prepare it again")
        if split not in manifest["splits"]:
            there = ", ".join(manifest["splits"]) or "none"
            raise ValueError(f"{folder} has no split {split!r} (there: {there}); prepare it again")
        entry = manifest["splits"][split]
        parts = [_Shard(folder, file, entry["dtype"], verify) for file in entry["files"]]
        before = np.cumsum([0] + [part.mapped_bytes for part in parts])
        for part in parts[: np.searchsorted(before, VERIFIED_BYTES)] if verify else []:
            part.starts()
            part.read()
        return cls(parts, entry["bos"], manifest["fingerprint"], folder / f"{split}-rows")

    @classmethod
    def from_arrays(
        cls,
        ids: Sequence[np.ndarray | Sequence[int]],
        masks: Sequence[np.ndarray | Sequence[bool]] | None = None,
    ) -> Corpus:
        """A corpus in memory. Each document starts with the same BOS; `masks` is True at tokens to be learned."""
        if not len(ids) or any(len(document) == 0 for document in ids):
            raise ValueError("a corpus needs at least one document, and each needs at least its BOS")
        if masks is not None and [len(m) for m in masks] != [len(document) for document in ids]:
            raise ValueError("each document's mask must be as long as its ids")
        bos = int(ids[0][0])
        other = next((index for index, document in enumerate(ids) if document[0] != bos), None)
        if other is not None:
            raise ValueError(f"document {other} starts with id {ids[other][0]}, document 0 with BOS {bos}")
        lengths = np.array([len(document) for document in ids], dtype=np.int64)
        tokens = np.concatenate([np.asarray(document, dtype=np.int32) for document in ids])
        mask = None if masks is None else np.concatenate([np.asarray(m, dtype=bool) for m in masks])
        return cls([Part(tokens, np.cumsum(lengths) - lengths, mask)], bos)

    @classmethod
    def join(cls, corpora: Sequence[Corpus]) -> Corpus:
        """The documents of several corpora of one tokenizer, in order. It shares the tokens."""
        bases = np.cumsum([0] + [corpus._bases[-1] for corpus in corpora])
        starts = np.concatenate([corpus.starts + base for corpus, base in zip(corpora, bases, strict=False)])
        lengths = np.concatenate([corpus.lengths for corpus in corpora])
        return cls([part for corpus in corpora for part in corpus.parts], corpora[0].bos, spans=(starts, lengths))

    def part(self, documents: np.ndarray) -> Corpus:
        """A corpus of the documents with these indices, each as often as it is named. It shares the tokens."""
        return Corpus(self.parts, self.bos, self.fingerprint, spans=self.take(documents))

    # Where documents are -------------------------------------------------------------------------------------------

    @property
    def num_documents(self) -> int:
        return int(self._sizes[0][-1])

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, BOS included."""
        return int(self._sizes[1][-1])

    @property
    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Documents and tokens before each part, and of all. Chosen documents are like one part."""
        if self._chosen is None:
            return self._firsts, self._bases
        return np.array([0, len(self._chosen[1])]), np.array([0, self._chosen[1].sum()])

    def _begins(self, number: int) -> np.ndarray:
        """Tokens of a part before each of its documents."""
        if self._chosen is None:
            return self.parts[number].starts()
        return np.cumsum(self._chosen[1]) - self._chosen[1]

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
        """Where the documents with these indices are."""
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
        firsts, tokens = self._sizes
        number = int(np.searchsorted(firsts, document, side="right")) - 1
        local = document - int(firsts[number])
        return int(tokens[number]) + (int(self._begins(number)[local]) if local else 0)

    def at_size(self, size: int, each: int) -> int:
        """The first document before which there are `size` tokens, where each document counts as `each` more; the
        number of documents if there is none."""
        firsts, tokens = self._sizes
        before = tokens + each * firsts
        number = int(np.searchsorted(before, size, side="right")) - 1
        if number == len(firsts) - 1:
            return self.num_documents
        begins = self._begins(number)
        sizes = begins + each * np.arange(len(begins))
        return int(firsts[number] + np.searchsorted(sizes, size - before[number], side="left"))

    # Their tokens --------------------------------------------------------------------------------------------------

    def gather(self, document: int, start: int = 0) -> np.ndarray:
        """The tokens of one document from `start` on, int32."""
        begin, tokens = self.take(np.array([document]))
        out = np.empty(int(tokens[0]) - start, dtype=np.int32)
        self.copy(out, np.zeros(1, np.int64), begin + start, tokens - start)
        return out

    def copy(self, out: np.ndarray, at: np.ndarray, source: np.ndarray, length: np.ndarray, mask: bool = False) -> None:
        """Copies many slices: out[at:at + length] = tokens[source:source + length] for each entry.

        Args:
            out: Flat, int32 for tokens and bool for masks.
            at, source, length: (slices,) int64. `source` is an index over all parts; a slice is in one part.
            mask: Copies the mask, True where a token is learned, in place of the tokens. The corpus has masks.
        """
        numbers = np.searchsorted(self._bases, source, side="right") - 1
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
