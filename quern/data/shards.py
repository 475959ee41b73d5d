"""Token shards: documents as token ids on disk, and the Corpus that reads them.

A folder has, for each split, `<split>-00000.bin`, `<split>-00000.starts.npy`, …, and one `manifest.json` for all. A
.bin file is 256 int32 (magic 20240520, version, token count), then the tokens: uint16 (version 1, the format of
llm.c and modded-nanogpt) or uint32 (version 2, for vocabularies above 65,536). The .starts.npy file has the index
of the first token of each document, int64. A document starts with BOS and is in one file. Where not every token is to
be learned, .mask has a byte for each token: 1 to learn it, else 0.

shard_writer.py writes them. The manifest has the size and SHA-256 of each file, and a fingerprint of the tokenizer and
the source, by which `prepared` sees that nothing changed. Errors name the damaged file.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.index import ArrayIndex, FileIndex, Index, Spans
from quern.data.mapped import MappedFiles
from quern.data.token_file import (
    InMemory,
    ShardFile,
    TokenMap,
    read_manifest,
    split_files,
)
from quern.waits.waiting import waiting

VERIFIED_BYTES = 1 << 28
"""Bytes that are hashed when a corpus is opened; a large one would take minutes."""


def fingerprint(*parts: str) -> str:
    """SHA-256 (hex) over strings; the length of each is hashed too, so ("ab", "c") differs from ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def prepared(folder: str | Path, fingerprint: str, splits: Iterable[str] = ("train", "val")) -> bool:
    """Whether `folder` has these splits with this fingerprint, and every file with its size."""
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except (FileNotFoundError, ValueError):
        return False  # absent or unreadable: in both cases prepare it again
    if manifest["fingerprint"] != fingerprint or not set(splits) <= set(manifest["splits"]):
        return False
    return all(_are_there(folder, manifest["splits"][split]) for split in splits)


def prepared_in_part(folder: Path, fingerprint: str, split: str) -> tuple[int, int]:
    """Documents and tokens in the finished shards of a split that is not whole; (0, 0) for another one, or where one
    of its files is missing."""
    try:
        manifest = read_manifest(folder)
    except (FileNotFoundError, ValueError):
        return 0, 0
    entry = manifest["unfinished"].get(split)
    if manifest["fingerprint"] != fingerprint or entry is None or not _are_there(folder, entry):
        return 0, 0
    return entry["documents"], entry["tokens"]


def _are_there(folder: Path, entry: dict[str, Any]) -> bool:
    """Whether the folder has every file of a split, with its size."""
    files = [(folder / file["name"], file["bytes"]) for file in split_files(entry)]
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


class Corpus:
    """Documents of token ids. Files are mapped, and documents looked up, when they are read.

    Args:
        files: The tokens.
        index: Where the documents are in them.
        bos: The id that every document starts with.
        fingerprint: Of the shards; None for other sources.
        cache: A folder where a loader may keep what it found out about the documents; None for other sources.
    """

    def __init__(
        self, files: MappedFiles, index: Index, bos: int, fingerprint: str | None = None, cache: Path | None = None
    ) -> None:
        self.files, self.index, self.bos, self.masked = files, index, bos, files.masked
        self.fingerprint, self.cache = fingerprint, cache

    @property
    def num_documents(self) -> int:
        return self.index.documents

    @property
    def num_tokens(self) -> int:
        return self.index.tokens

    @property
    def whole(self) -> bool:
        """Whether all documents are there, so that the numbers above are final."""
        return True

    def wait(self, size: int | None = None, each: int = 0) -> None:
        """Returns when the documents that come next are there: those of a whole corpus are.

        Args:
            size: Tokens that are needed, with `each` for each document; None needs all documents.
        """

    @cached_property
    def _spans(self) -> Spans:
        return self.index.span(0, self.num_documents)

    @property
    def starts(self) -> np.ndarray:
        """(documents,) int64, index of the first token of each document, over all files; kept in memory."""
        return self._spans[0]

    @property
    def lengths(self) -> np.ndarray:
        """(documents,) int64, tokens of each document with BOS; kept in memory."""
        return self._spans[1]

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
        files = [ShardFile(folder, file, entry["dtype"], verify) for file in entry["files"]]
        hashed = 0
        for file in files if verify else []:
            if hashed < VERIFIED_BYTES:
                hashed += file.verify()
        cache = folder / f"{split}-rows"
        return cls(MappedFiles(files), FileIndex(files), entry["bos"], manifest["fingerprint"], cache)

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
        flat_masks = None if masks is None else np.concatenate([np.asarray(m, dtype=bool) for m in masks])
        index = ArrayIndex(np.cumsum(lengths) - lengths, lengths)
        return cls(MappedFiles([InMemory(TokenMap(tokens, mask=flat_masks))]), index, bos)

    @classmethod
    def join(cls, corpora: Sequence[Corpus]) -> Corpus:
        """The documents of several corpora of one tokenizer, in order. It shares the tokens."""
        bases = np.cumsum([0] + [corpus.files.count for corpus in corpora])
        starts = [corpus.starts + base for corpus, base in zip(corpora, bases, strict=False)]
        lengths = [corpus.lengths for corpus in corpora]
        files = MappedFiles([file for corpus in corpora for file in corpus.files.files])
        return cls(files, ArrayIndex(np.concatenate(starts), np.concatenate(lengths)), corpora[0].bos)

    def part(self, documents: np.ndarray) -> Corpus:
        """A corpus of the documents with these indices, each as often as it is named. It shares the tokens."""
        return Corpus(self.files, ArrayIndex(*self.index.take(documents)), self.bos, self.fingerprint)

    def gather(self, document: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of one document from `start` on, int32; to its end without a length."""
        begin, tokens = self.index.take(np.array([document]))
        rest = int(tokens[0]) - start
        length = rest if length is None else length
        if start < 0 or not 0 <= length <= rest:
            raise ValueError(f"document {document} has {tokens[0]} tokens, not {start} + {length}")
        out = np.empty(length, dtype=np.int32)
        self.copy(out, np.zeros(1, np.int64), begin + start, np.array([length]))
        return out

    def copy(self, out: np.ndarray, at: np.ndarray, source: np.ndarray, length: np.ndarray) -> None:
        """Copies many slices: out[at:at + length] = tokens[source:source + length] for each entry.

        Args:
            out: Flat int32.
            at, source, length: (slices,) int64. `source` is an index over all files; a slice is in one file.
        """
        self.files.copy("tokens", out, at, source, length)

    def copy_mask(self, out: np.ndarray, at: np.ndarray, source: np.ndarray, length: np.ndarray) -> None:
        """Copies the mask, like `copy`: True where a token is learned. out: flat bool; the corpus has masks."""
        self.files.copy("mask", out, at, source, length)

    def release(self) -> None:
        """Frees the mapped pages, so that a large corpus does not fill the memory. The corpus stays readable."""
        self.files.release()


class GrowingCorpus(Corpus):
    """A split whose first shards are read while later ones are written.

    Args:
        folder, split, fingerprint: As given to `ShardWriter`.
        missing: Called with the number of shards that are there, again and again until a needed one is there too. It
            waits a moment, or raises the reason why no more will come.

    Raises:
        ValueError: The folder has another fingerprint, or a shard is damaged.
    """

    def __init__(self, folder: Path, split: str, fingerprint: str, missing: Callable[[int], object]) -> None:
        self._folder, self._split, self._expected, self._missing = folder, split, fingerprint, missing
        self._waiting, self._whole = threading.Lock(), False
        files, bos = self._next_files(0)
        self._growing = FileIndex(files)
        super().__init__(MappedFiles(files), self._growing, bos, fingerprint, folder / f"{split}-rows")

    @property
    def whole(self) -> bool:
        return self._whole

    def wait(self, size: int | None = None, each: int = 0) -> None:
        with self._waiting:
            while not self._whole and (size is None or self.num_tokens + each * self.num_documents < size):
                files, _ = self._next_files(len(self.files.files))
                self.files.extend(files)
                self._growing.extend(files)

    def _next_files(self, known: int) -> tuple[list[ShardFile], int]:
        """Waits until there are more shards than those that are known, or the split is whole: the new ones, and BOS."""
        with waiting(f"shard {known + 1} of the text in {self._folder}, which another process prepares"):
            while True:
                entry, self._whole = _listed(self._folder, self._split, self._expected)
                if entry is not None and (self._whole or len(entry["files"]) > known):
                    new = [
                        ShardFile(self._folder, file, entry["dtype"], hashed=True) for file in entry["files"][known:]
                    ]
                    return new, entry["bos"]
                self._missing(known)


def _listed(folder: Path, split: str, fingerprint: str) -> tuple[dict[str, Any] | None, bool]:
    """The split as the manifest lists it now, and whether it is whole; None if no shard is finished.

    Raises:
        ValueError: The folder has another fingerprint.
    """
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return None, False
    if manifest["fingerprint"] != fingerprint:
        raise ValueError(f"{folder} was made from another tokenizer or source; prepare it again")
    whole = split in manifest["splits"]
    return (manifest["splits"] if whole else manifest["unfinished"]).get(split), whole
