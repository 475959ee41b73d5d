"""Token shards: documents as token ids on disk, and the Corpus that reads them.

A folder has, for each split, `<split>-00000.bin`, `<split>-00000.starts.npy`, …, and one `manifest.json` for all. A
.bin file is 256 int32 (magic 20240520, version, token count), then the tokens: uint16 (version 1, the format of
llm.c and modded-nanogpt) or uint32 (version 2, for vocabularies above 65,536). The .starts.npy file has the index
of the first token of each document, int64. A document starts with BOS and is in one file. Where not every token is to
be learned, .mask has a byte for each token: 1 to learn it, else 0.

The writer makes files in a temporary folder, syncs and renames them, and writes the manifest last; temporaries.py
removes what a killed writer leaves. The manifest has the size and SHA-256 of each file, and a fingerprint of the
tokenizer and the source, by which `prepared` sees that nothing changed. Errors name the damaged file.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike

from quern.data.token_file import (
    HEADER_BYTES,
    HEADER_INTS,
    MAGIC,
    VERSIONS,
    TokenFile,
    check,
    describe,
    map_mask,
    map_tokens,
    read_manifest,
    split_files,
    write_manifest,
)
from quern.temporaries import TemporaryFolder, remove_abandoned, sync_path

FAULT_BYTES = 2 << 20
"""Memory that one access to a map may load at most: Linux maps up to one large folio."""


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
    files = [file for split in splits for file in split_files(manifest["splits"][split])]
    return all((folder / f["name"]).is_file() and (folder / f["name"]).stat().st_size == f["bytes"] for f in files)


class ShardWriter:
    """Writes one split. Use it in a `with` block: an error in the block leaves the folder unchanged.

    Args:
        folder: The folder of the data; created if needed.
        split: Its name, such as "train".
        dtype: uint16 or uint32; None chooses the smaller one that fits the vocabulary.
        shard_tokens: A file is closed as soon as it has this many tokens.
        vocab_size: Ids must be below it.
        bos: The id that every document starts with.
        fingerprint: What the tokens are made from; see `fingerprint`.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        dtype: DTypeLike | None = None,
        shard_tokens: int = 100_000_000,
        *,
        vocab_size: int,
        bos: int,
        fingerprint: str,
    ) -> None:
        self.dtype = np.dtype(dtype if dtype is not None else np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.dtype = self.dtype.newbyteorder("<")
        if self.dtype not in VERSIONS.values():
            raise ValueError(f"shards hold uint16 or uint32, not {self.dtype}")
        if not 1 <= vocab_size <= 1 << (8 * self.dtype.itemsize):
            raise ValueError(f"a vocabulary of {vocab_size:,} does not fit {self.dtype}; use uint32")
        if not 0 <= bos < vocab_size:
            raise ValueError(f"bos ({bos}) must be an id below the vocabulary size ({vocab_size:,})")
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens ({shard_tokens}) must be at least 1")
        self.folder, self.split = Path(folder), split
        self.vocab_size, self.bos, self.fingerprint = vocab_size, bos, fingerprint
        self.shard_tokens = shard_tokens
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.folder, split)
        self._temporary = TemporaryFolder(self.folder / split)
        self._work = self._temporary.path
        self._files: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._mask: BinaryIO | None = None
        self._starts: list[int] = []
        self._tokens = self._documents = 0
        self._closed = False

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()

    def add(self, ids: Sequence[int] | np.ndarray, mask: np.ndarray | None = None) -> None:
        """Appends one document, BOS first. Raises ValueError if an id is not in the vocabulary.

        mask: (T,) bool, True where a token is to be learned. All documents have one, or none has.
        """
        wide = np.asarray(ids, dtype=np.int64)
        if wide.ndim != 1 or not wide.size or wide[0] != self.bos:
            raise ValueError(f"document {self._documents} of {self.split} must start with BOS (id {self.bos})")
        if wide.min() < 0 or wide.max() >= self.vocab_size:
            wrong = int(wide[(wide < 0) | (wide >= self.vocab_size)][0])
            raise ValueError(
                f"document {self._documents} of {self.split} holds id {wrong}, outside the vocabulary of "
                f"{self.vocab_size:,}: was it encoded with another tokenizer?"
            )
        if self._file is None:
            path = self._work / f"{self.split}-{len(self._files):05d}.bin"
            self._file = open(path, "wb")  # noqa: SIM115
            self._file.write(bytes(HEADER_BYTES))
            self._mask = None if mask is None else open(path.with_suffix(".mask"), "wb")  # noqa: SIM115
        if (mask is None) != (self._mask is None) or (mask is not None and mask.shape != wide.shape):
            raise ValueError(f"document {self._documents} of {self.split} needs a mask as long as its ids, as all have")
        if self._tokens + wide.size >= 1 << 31:
            raise ValueError("a shard holds fewer than 2**31 tokens; split the document or lower shard_tokens")
        self._starts.append(self._tokens)
        self._file.write(wide.astype(self.dtype).tobytes())
        if self._mask is not None and mask is not None:
            self._mask.write(mask.astype(bool).tobytes())
        self._tokens += wide.size
        self._documents += 1
        if self._tokens >= self.shard_tokens:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._file is None:
            return
        header = np.zeros(HEADER_INTS, dtype="<i4")
        version = next(v for v, dtype in VERSIONS.items() if dtype == self.dtype)
        header[:3] = MAGIC, version, self._tokens
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.close()
        path = Path(self._file.name)
        starts = path.with_suffix(".starts.npy")
        np.save(starts, np.array(self._starts, dtype="<i8"), allow_pickle=False)
        sync_path(path)
        sync_path(starts)
        entry = describe(path) | {"tokens": self._tokens, "documents": len(self._starts)}
        entry["starts"] = describe(starts)
        if self._mask is not None:
            self._mask.close()
            sync_path(path.with_suffix(".mask"))
            entry["mask"] = describe(path.with_suffix(".mask"))
        self._files.append(entry)
        self._file, self._mask, self._starts, self._tokens = None, None, [], 0

    def close(self) -> None:
        """Moves the files into the folder and lists them in the manifest. Raises ValueError without documents."""
        if self._closed:
            return
        if not self._documents:
            self.abandon()
            raise ValueError(f"no documents for the split {self.split!r}: nothing to write in {self.folder}")
        self._finish_file()
        try:
            manifest = read_manifest(self.folder)
        except (FileNotFoundError, ValueError):
            manifest = {}
        splits = manifest.get("splits", {}) if manifest.get("fingerprint") == self.fingerprint else {}
        splits.pop(self.split, None)
        # The manifest must not list files while they are replaced: a crash here then reads as "not prepared".
        write_manifest(self.folder, self.fingerprint, splits)
        for old in self.folder.glob(f"{self.split}-[0-9]*.*"):
            old.unlink()
        for file in split_files({"files": self._files}):
            os.replace(self._work / file["name"], self.folder / file["name"])
        splits[self.split] = {
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "bos": self.bos,
            "documents": self._documents,
            "tokens": sum(file["tokens"] for file in self._files),
            "files": self._files,
        }
        sync_path(self.folder)
        write_manifest(self.folder, self.fingerprint, splits)
        self.abandon()

    def abandon(self) -> None:
        """Removes the files written so far and leaves the folder unchanged."""
        self._closed = True
        try:
            for file in (self._file, self._mask):
                if file is not None:
                    file.close()  # flushes the buffer, which fails again on a full disk
        finally:
            self._temporary.remove()


class Corpus:
    """Documents of token ids, with one index over all files in order.

    Args:
        parts: The tokens of each file.
        starts: (documents,) int64, index of the first token of each document.
        lengths: (documents,) int64, tokens of each document with BOS.
        bos: The id that every document starts with.
        fingerprint: Of the shards; None for other sources.
        skipped_tokens: Tokens of foreign files that belong to no document.
        resident_bytes: Most bytes of the files that stay mapped in memory (an upper estimate).
    """

    def __init__(
        self,
        parts: Sequence[TokenFile],
        starts: np.ndarray,
        lengths: np.ndarray,
        bos: int,
        fingerprint: str | None = None,
        skipped_tokens: int = 0,
        resident_bytes: int = 1 << 30,
    ) -> None:
        self._parts = list(parts)
        self._bases = np.cumsum([0] + [len(part.tokens) for part in self._parts])
        self.starts, self.lengths, self.bos = starts, lengths, bos
        self.masked = all(part.mask is not None for part in self._parts)
        self.fingerprint, self.skipped_tokens = fingerprint, skipped_tokens
        self.resident_bytes = resident_bytes
        self._touched_bytes = 0
        self._mapped_bytes = sum(part.mapped_bytes for part in self._parts)

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @classmethod
    def open(cls, folder: str | Path, split: str, *, fingerprint: str | None = None, verify: bool = True) -> Corpus:
        """Opens a split of a prepared folder and checks it against the manifest.

        Args:
            folder, split: As given to `ShardWriter`.
            fingerprint: The expected fingerprint; None accepts any.
            verify: Whether to check the hash of each file (about a second per GB), not only size and header.

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
        for file in split_files(entry):
            check(folder / file["name"], file, verify)
        parts: list[TokenFile] = []
        firsts: list[np.ndarray] = []
        for file in entry["files"]:
            part = map_tokens(folder / file["name"], headerless=False)
            first = np.load(folder / file["starts"]["name"], allow_pickle=False)
            rises = np.diff(first, append=len(part.tokens)) > 0
            if part.tokens.dtype.name != entry["dtype"] or first[0] != 0 or not rises.all():
                raise ValueError(f"{folder / file['name']} does not match its document starts; prepare it again")
            parts.append(map_mask(part, folder / file["mask"]["name"]) if "mask" in file else part)
            firsts.append(first)
        return cls(parts, *_flat(parts, firsts), bos=entry["bos"], fingerprint=manifest["fingerprint"])

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
        return cls([TokenFile(tokens, mask=flat_masks)], np.cumsum(lengths) - lengths, lengths, bos)

    @classmethod
    def join(cls, corpora: Sequence[Corpus]) -> Corpus:
        """The documents of several corpora of one tokenizer, in order. It shares the tokens."""
        bases = np.cumsum([0] + [int(corpus._bases[-1]) for corpus in corpora])
        starts = [corpus.starts + base for corpus, base in zip(corpora, bases, strict=False)]
        lengths = [corpus.lengths for corpus in corpora]
        parts = [part for corpus in corpora for part in corpus._parts]
        return cls(parts, np.concatenate(starts), np.concatenate(lengths), corpora[0].bos)

    def part(self, documents: np.ndarray) -> Corpus:
        """A corpus of the documents with these indices, each as often as it is named. It shares the tokens."""
        starts, lengths = self.starts[documents], self.lengths[documents]
        return Corpus(self._parts, starts, lengths, self.bos, self.fingerprint, 0, self.resident_bytes)

    def gather(self, document: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of one document from `start` on, int32; to its end without a length."""
        rest = int(self.lengths[document]) - start
        length = rest if length is None else length
        if start < 0 or not 0 <= length <= rest:
            raise ValueError(f"document {document} has {self.lengths[document]} tokens, not {start} + {length}")
        out = np.empty(length, dtype=np.int32)
        self.copy(out, np.zeros(1, np.int64), self.starts[[document]] + start, np.array([length]))
        return out

    def copy(self, out: np.ndarray, at: np.ndarray, source: np.ndarray, length: np.ndarray) -> None:
        """Copies many slices: out[at:at + length] = tokens[source:source + length] for each entry.

        Args:
            out: Flat int32.
            at, source, length: (slices,) int64. `source` is an index over all files; a slice is in one file.
        """
        self._copy([part.tokens for part in self._parts], out, at, source, length)

    def copy_mask(self, out: np.ndarray, at: np.ndarray, source: np.ndarray, length: np.ndarray) -> None:
        """As `copy`, of the mask: True where a token is to be learned. out: flat bool; the corpus has masks."""
        masks = [part.mask for part in self._parts if part.mask is not None]
        self._copy(masks, out, at, source, length)

    def _copy(
        self, arrays: Sequence[np.ndarray], out: np.ndarray, at: np.ndarray, source: np.ndarray, length: np.ndarray
    ) -> None:
        part = np.searchsorted(self._bases, source, side="right") - 1
        local = source - self._bases[part]
        for which, frm, to, count in zip(part.tolist(), local.tolist(), at.tolist(), length.tolist(), strict=True):
            out[to : to + count] = arrays[which][frm : frm + count]
        self._touched_bytes += len(source) * FAULT_BYTES
        if self._touched_bytes > self.resident_bytes < self._mapped_bytes:
            self.release()

    def release(self) -> None:
        """Frees the mapped pages, so that a large corpus does not fill the memory. The corpus stays readable."""
        self._touched_bytes = 0
        for part in self._parts:
            for mapped in part.maps if hasattr(mmap, "MADV_DONTNEED") else ():
                mapped.madvise(mmap.MADV_DONTNEED)


def _flat(parts: Sequence[TokenFile], firsts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) over all files, from the index in each file of the first token of its documents."""
    bases = np.cumsum([0] + [len(part.tokens) for part in parts])
    starts = [first + base for first, base in zip(firsts, bases, strict=False)]
    lengths = [np.diff(first, append=len(part.tokens)) for part, first in zip(parts, firsts, strict=True)]
    return np.concatenate(starts), np.concatenate(lengths)
