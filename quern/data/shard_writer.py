"""Writes token shards, one by one: a shard appears whole or not at all, and a writer that was killed is continued.

A shard is written in a temporary folder, synced, renamed into place, and then listed in the manifest with the hash of
each of its files. Until the split is whole, the manifest lists it as unfinished, so that no reader opens it. A later
writer of the same tokens (the fingerprint says so) checks these hashes, keeps the shards, and continues after them.
token_file.py has the format.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from quern.data.token_file import HEADER_BYTES, check, describe, header, read_manifest, split_files, write_manifest
from quern.temporaries import TemporaryFolder, remove_abandoned, sync_path

SHARD_TOKENS = 100_000_000


class ShardWriter:
    """Writes one split. Use it in a `with` block. Give it the documents from number `documents` on: shards that an
    earlier writer finished hold those before.

    Args:
        folder: The folder of the data; created if needed.
        split: Its name, such as "train".
        shard_tokens: A file is closed as soon as it has this many tokens.
        vocab_size: Ids must be below it. They are written as uint16 if they fit, else as uint32.
        bos: The id that every document starts with.
        fingerprint: What the tokens are made from; see `token_file.fingerprint`. Equal fingerprints, equal documents.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        shard_tokens: int = SHARD_TOKENS,
        *,
        vocab_size: int,
        bos: int,
        fingerprint: str,
    ) -> None:
        self.folder, self.split, self.shard_tokens = Path(folder), split, shard_tokens
        self.vocab_size, self.bos, self.fingerprint = vocab_size, bos, fingerprint
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.folder, split)
        self._files = self._finished_files()
        self.documents = sum(file["documents"] for file in self._files)
        """How many documents the split has so far."""
        self._temporary = TemporaryFolder(self.folder / split)
        self._file: BinaryIO | None = None
        self._mask: BinaryIO | None = None
        self._starts = array("q")
        self._tokens = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            if kind is None:
                self._finish_split()
        finally:
            try:
                for file in (self._file, self._mask):
                    if file is not None:
                        file.close()  # flushes the buffer, which fails again on a full disk
            finally:
                self._temporary.remove()

    @property
    def tokens(self) -> int:
        """How many tokens the split has so far."""
        return sum(file["tokens"] for file in self._files) + self._tokens

    def add(self, ids: Sequence[int] | np.ndarray, mask: np.ndarray | None = None) -> None:
        """Appends one document: `add_documents` with this one."""
        self.add_documents(np.asarray(ids), np.array([len(ids)]), mask)

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Appends documents.

        Args:
            ids: (T,) ids of all of them, BOS first in each.
            lengths: (documents,) ids of each, BOS included.
            mask: (T,) bool, True where a token is to be learned. All documents of a split have one, or none has.

        Raises:
            ValueError: An id is not in the vocabulary, a document does not start with BOS, or the mask does not fit.
        """
        ends = np.cumsum(lengths)
        self._refuse_wrong(ids, ends - lengths, ends)
        if mask is not None and mask.shape != ids.shape or (mask is None) != (self._mask is None) and self._file:
            raise ValueError(f"document {self.documents} of {self.split} needs a mask as long as its ids, as all have")
        first = begin = 0
        while first < len(lengths):
            # The document with which the shard reaches its size is its last one.
            last = min(len(lengths) - 1, int(np.searchsorted(ends, begin + self.shard_tokens - self._tokens)))
            end = int(ends[last])
            starts = ends[first : last + 1] - lengths[first : last + 1] - begin
            self._write(ids[begin:end], starts, None if mask is None else mask[begin:end])
            if self._tokens >= self.shard_tokens:
                self._finish_shard()
                self._write_manifest(whole=False)
            first, begin = last + 1, end

    def _refuse_wrong(self, ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        empty = starts == ends
        wrong = empty if empty.any() else ids[starts] != self.bos
        if wrong.any():
            number = self.documents + int(np.argmax(wrong))
            raise ValueError(f"document {number} of {self.split} must start with BOS (id {self.bos})")
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= self.vocab_size:
            at = int(np.argmax((ids < 0) | (ids >= self.vocab_size)))
            number = self.documents + int(np.searchsorted(ends, at, side="right"))
            raise ValueError(
                f"document {number} of {self.split} holds id {ids[at]}, outside the vocabulary of "
                f"{self.vocab_size:,}: was it encoded with another tokenizer?"
            )

    def _write(self, ids: np.ndarray, starts: np.ndarray, mask: np.ndarray | None) -> None:
        """Appends documents to the open shard. starts: of the documents in `ids`."""
        if self._file is None:
            path = self._temporary.path / f"{self.split}-{len(self._files):05d}.bin"
            self._file = open(path, "wb")  # noqa: SIM115
            self._file.write(bytes(HEADER_BYTES))
            self._mask = None if mask is None else open(path.with_suffix(".mask"), "wb")  # noqa: SIM115
        if self._tokens + ids.size >= 1 << 31:
            raise ValueError("a shard holds fewer than 2**31 tokens; split the document or lower shard_tokens")
        self._starts.frombytes((self._tokens + starts).astype(np.int64).tobytes())
        self._file.write(ids.astype(self.dtype, copy=False).tobytes())
        if self._mask is not None and mask is not None:
            self._mask.write(mask.astype(bool).tobytes())
        self._tokens += ids.size
        self.documents += len(starts)

    def _finish_shard(self) -> None:
        """Syncs the open shard, and moves its files into the folder."""
        assert self._file is not None
        self._file.seek(0)
        self._file.write(header(self._tokens, self.dtype))
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
        if self.split in self._manifest()["splits"]:
            # The manifest must not list files while they are replaced: a crash here then reads as "not prepared".
            self._write_manifest(whole=False)
        for file in split_files({"files": [entry]}):
            os.replace(path.parent / file["name"], self.folder / file["name"])
        sync_path(self.folder)
        self._files.append(entry)
        self._file, self._mask, self._starts, self._tokens = None, None, array("q"), 0

    def _finish_split(self) -> None:
        """Finishes the last shard, and lists the split as whole."""
        if not self.documents:
            raise ValueError(f"no documents for the split {self.split!r}: nothing to write in {self.folder}")
        if self._file is not None:
            self._finish_shard()
        listed = {file["name"] for file in split_files({"files": self._files})}
        for old in self.folder.glob(f"{self.split}-[0-9]*.*"):
            if old.name not in listed:
                old.unlink()
        self._write_manifest(whole=True)

    # The manifest -------------------------------------------------------------------------------------------------

    def _manifest(self) -> dict[str, Any]:
        try:
            return read_manifest(self.folder)
        except (FileNotFoundError, ValueError):
            return {"fingerprint": None, "splits": {}, "unfinished": {}}

    def _layout(self) -> dict[str, Any]:
        return {"dtype": self.dtype.name, "vocab_size": self.vocab_size, "bos": self.bos}

    def _finished_files(self) -> list[dict[str, Any]]:
        """The shards of an earlier writer of the same tokens, up to the first one that is not sound."""
        manifest, files = self._manifest(), []
        entry = manifest["unfinished"].get(self.split)
        same = self._layout() | {"shard_tokens": self.shard_tokens}
        if entry is None or manifest["fingerprint"] != self.fingerprint or not same.items() <= entry.items():
            return []
        for shard in entry["files"]:
            try:
                for file in split_files({"files": [shard]}):
                    check(self.folder, file, verify=True)
            except (FileNotFoundError, ValueError):
                break  # it is written again, with those after it
            files.append(shard)
        return files

    def _write_manifest(self, whole: bool) -> None:
        """Lists the finished shards, as a whole split or as an unfinished one."""
        manifest = self._manifest()
        same = manifest["fingerprint"] == self.fingerprint
        splits, unfinished = (manifest[key] if same else {} for key in ("splits", "unfinished"))
        for entries in (splits, unfinished):
            entries.pop(self.split, None)
        counts = {key: sum(file[key] for file in self._files) for key in ("documents", "tokens")}
        entry = self._layout() | counts | {"files": self._files}
        if whole:
            splits[self.split] = entry
        else:
            unfinished[self.split] = entry | {"shard_tokens": self.shard_tokens}
        write_manifest(self.folder, self.fingerprint, splits, unfinished)
