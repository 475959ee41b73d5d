"""Token files on disk, their manifest, and their writer. shards.py reads them.

A folder has, for each split, `<split>-00000.bin`, `<split>-00000.starts.npy`, …, and one `manifest.json` for all. A
.bin file is 256 int32 (magic 20240520, version, token count), then the tokens: uint16 (version 1, the format of
llm.c and modded-nanogpt) or uint32 (version 2, for vocabularies above 65,536). The .starts.npy file has the index
of the first token of each document, int64. A document starts with BOS and is in one file. Where not every token is to
be learned, .mask has a byte for each token: 1 to learn it, else 0. The manifest has the size and SHA-256 of each file,
and a fingerprint of the tokenizer and the source.

A shard is written in a temporary folder, synced, renamed into place, and then listed in the manifest. Until the split
is whole, the manifest lists it as unfinished, so that no reader opens it. A later writer of the same tokens (the
fingerprint says so) checks the hashes of its files, keeps the shards, and continues after them.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypedDict

import msgspec
import numpy as np

from quern.records import FileFacts, FileName, Natural, read_json
from quern.temporaries import sha256_of, sync_path, temporary_folder, write_whole

MAGIC = 20240520
HEADER_BYTES = 1024
VERSIONS = {1: np.dtype("<u2"), 2: np.dtype("<u4")}
MANIFEST = "manifest.json"
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]  # msgspec does not read annotated-types


class _File(FileFacts):
    name: FileName


class _Shard(_File):
    tokens: Positive
    documents: Positive
    starts: _File
    mask: NotRequired[_File]


class _Split(TypedDict):
    dtype: Literal["uint16", "uint32"]
    vocab_size: Positive
    bos: Natural
    documents: NotRequired[Natural]
    tokens: NotRequired[Natural]
    files: list[_Shard]


class _Manifest(TypedDict):
    version: Literal[1]
    fingerprint: str
    splits: dict[str, _Split]
    unfinished: dict[str, _Split]


def fingerprint(*parts: str) -> str:
    """SHA-256 (hex) over strings; the length of each is hashed too, so ("ab", "c") differs from ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")  # for a file name that is no UTF-8
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def prepared(folder: str | Path, fingerprint: str, splits: Iterable[str] = ("train", "val")) -> bool:
    """Whether `folder` has these splits with this fingerprint, and every file with its size."""
    try:
        manifest = read_manifest(Path(folder))
        shards = [shard for split in splits for shard in manifest["splits"][split]["files"]]
        for file in (file for shard in shards for file in shard_files(shard)):
            check(Path(folder), file, verify=False)
    except (FileNotFoundError, ValueError, KeyError):
        return False  # absent, damaged or in part: in each case prepare it again
    return manifest["fingerprint"] == fingerprint


def header(count: int, dtype: np.dtype) -> bytes:
    """The header of a token file."""
    version = next(version for version, known in VERSIONS.items() if known == dtype)
    return np.array([MAGIC, version, count], dtype="<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def map_tokens(path: Path, headerless: bool = False) -> np.ndarray:
    """Maps a .bin file into memory. headerless: a file without the magic number is read as bare uint16.

    Raises FileNotFoundError or ValueError for a file that is missing, empty or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty")
    with open(path, "rb") as file:
        magic, version, count = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4").tolist()
    if magic == MAGIC:
        if version not in VERSIONS:
            raise ValueError(f"{path} has version {version}; known are {sorted(VERSIONS)}")
        if count < 1 or size != HEADER_BYTES + count * VERSIONS[version].itemsize:
            raise ValueError(f"{path} is damaged: its header says {count:,} tokens, its size is {size:,} bytes")
        return np.memmap(path, VERSIONS[version], "r", HEADER_BYTES).view(np.ndarray)
    if not headerless:
        raise ValueError(f"{path} is damaged: it does not begin with the magic number {MAGIC}")
    if size % 2:
        raise ValueError(f"{path} is neither a token file with a header nor bare uint16: {size:,} bytes is odd")
    return np.memmap(path, "<u2", "r").view(np.ndarray)


def shard_files(shard: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of a shard's files."""
    return [file for file in (shard, shard["starts"], shard.get("mask")) if file]


def describe(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file: name, size and SHA-256."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


AGAIN = "remove it, and the same command prepares it again"
"""Advice for a damaged file of the right size: the data counts as prepared as long as the file is there."""


def check(folder: Path, expected: dict[str, Any], verify: bool) -> Path:
    """Compares a file with its entry, the hash only with `verify`, and returns its path. Raises FileNotFoundError or
    ValueError if it is missing or damaged."""
    path = folder / expected["name"]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; prepare the data again")
    if path.stat().st_size != expected["bytes"]:
        sizes = f"{path.stat().st_size:,} bytes instead of {expected['bytes']:,}"
        raise ValueError(f"{path} is damaged: {sizes}; prepare the data again")
    if verify and sha256_of(path) != expected["sha256"]:
        raise ValueError(f"{path} is damaged or was swapped: its hash is not the manifest's; {AGAIN}")
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. Raises FileNotFoundError or ValueError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the data was not prepared, or not to the end; prepare it again")
    return dict(read_json(path, _Manifest, "prepare the data again"))


def write_manifest(folder: Path, fingerprint: str, splits: dict[str, Any], unfinished: dict[str, Any]) -> None:
    """Writes the manifest. unfinished: the splits whose writer has finished some shards, which no reader opens."""
    manifest = {"version": 1, "fingerprint": fingerprint, "splits": splits, "unfinished": unfinished}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))
    sync_path(folder)


SHARD_TOKENS = 100_000_000


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """Writes one split. Use it in a `with` block. Give it the documents from number `documents` on: shards that an
    earlier writer finished hold those before.

    Args:
        folder: The folder of the data; created if needed.
        split: Its name, such as "train".
        shard_tokens: A file is closed as soon as it has this many tokens.
        vocab_size: Ids must be below it. They are written as uint16 if they fit, else as uint32.
        bos: The id that every document starts with.
        fingerprint: Identifies what the tokens are made from (`fingerprint`): equal fingerprints, equal documents.
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
        self._layout = {"dtype": self.dtype.name, "vocab_size": vocab_size, "bos": bos}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._shards = self._finished_shards()
        self.documents = sum(shard["documents"] for shard in self._shards)
        """How many documents the split has so far."""
        self._ending = ExitStack()
        self._temporary = self._ending.enter_context(temporary_folder(self.folder / split))
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._file: BinaryIO | None = None
        self._mask: BinaryIO | None = None
        self._starts, self._tokens = array("q"), 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        with self._ending as stack:
            for file in filter(None, (self._file, self._mask)):
                stack.callback(file.close)  # flushes the buffer, which fails again on a full disk
            if kind is None:
                self._finish_split()

    @property
    def tokens(self) -> int:
        """Number of tokens of the split so far."""
        return sum(shard["tokens"] for shard in self._shards) + self._tokens

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
        starts = ends - lengths
        if not lengths.all() or (ids[starts] != self.bos).any():
            raise ValueError(f"each document of {self.split} must start with BOS (id {self.bos})")
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= self.vocab_size:
            raise ValueError(f"{self.split} holds ids outside the vocabulary of {self.vocab_size:,}")
        if mask is not None and mask.shape != ids.shape or (mask is None) != (self._mask is None) and self._file:
            rule = "all documents have a mask, as long as their ids, or none has one"
            raise ValueError(f"document {self.documents} of {self.split}: {rule}")
        first = begin = 0
        while first < len(lengths):
            # The document with which the shard reaches its size is its last one.
            last = min(len(lengths), int(np.searchsorted(ends, begin + self.shard_tokens - self._tokens)) + 1)
            end = int(ends[last - 1])
            self._write(ids[begin:end], starts[first:last] - begin, None if mask is None else mask[begin:end])
            if self._tokens >= self.shard_tokens:
                self._finish_shard()
                self._write_manifest(whole=False)
            first, begin = last, end

    def _write(self, ids: np.ndarray, starts: np.ndarray, mask: np.ndarray | None) -> None:
        """Appends documents to the open shard. starts: the documents' starts in `ids`."""
        if self._file is None:
            path = self._temporary / f"{self.split}-{len(self._shards):05d}.bin"
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
        made = {"": Path(self._file.name), "starts": Path(self._file.name).with_suffix(".starts.npy")}
        np.save(made["starts"], np.array(self._starts, dtype="<i8"), allow_pickle=False)
        self._file.close()
        if self._mask is not None:
            self._mask.close()
            made["mask"] = Path(self._mask.name)
        for path in made.values():
            sync_path(path)
        entry = describe(made.pop("")) | {"tokens": self._tokens, "documents": len(self._starts)}
        entry |= {kind: describe(path) for kind, path in made.items()}
        if not self._shards:
            # The manifest must not list files while they are replaced: a crash here then reads as "not prepared".
            self._write_manifest(whole=False)
        for file in shard_files(entry):
            os.replace(self._temporary / file["name"], self.folder / file["name"])
        sync_path(self.folder)
        self._shards.append(entry)
        self._begin_shard()

    def _finish_split(self) -> None:
        """Finishes the last shard, and lists the split as whole."""
        if not self.documents:
            raise ValueError(f"no documents for the split {self.split!r}: nothing to write in {self.folder}")
        if self._file is not None:
            self._finish_shard()
        listed = {file["name"] for shard in self._shards for file in shard_files(shard)}
        for old in self.folder.glob(f"{self.split}-[0-9]*.*"):
            if old.name not in listed:
                old.unlink()
        self._write_manifest(whole=True)

    # The manifest -------------------------------------------------------------------------------------------------

    def _read_manifest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The whole splits and the unfinished ones of the same tokens; none if the folder has others."""
        try:
            manifest = read_manifest(self.folder)
        except (FileNotFoundError, ValueError):
            return {}, {}
        return (manifest["splits"], manifest["unfinished"]) if manifest["fingerprint"] == self.fingerprint else ({}, {})

    def _finished_shards(self) -> list[dict[str, Any]]:
        """The shards of an earlier writer of the same tokens, up to the first one that is not sound."""
        entry = self._read_manifest()[1].get(self.split, {})
        sound = list[dict[str, Any]]()
        if not (self._layout | {"shard_tokens": self.shard_tokens}).items() <= entry.items():
            return []
        for shard in entry["files"]:
            try:
                for file in shard_files(shard):
                    check(self.folder, file, verify=True)
            except (FileNotFoundError, ValueError):
                break  # it is written again, with those after it
            sound.append(shard)
        return sound

    def _write_manifest(self, whole: bool) -> None:
        """Lists the finished shards, as a whole split or as an unfinished one."""
        splits, unfinished = self._read_manifest()
        for entries in (splits, unfinished):
            entries.pop(self.split, None)
        counts = {key: sum(shard[key] for shard in self._shards) for key in ("documents", "tokens")}
        entry = self._layout | counts | {"files": self._shards}
        if whole:
            splits[self.split] = entry
        else:
            unfinished[self.split] = entry | {"shard_tokens": self.shard_tokens}
        write_manifest(self.folder, self.fingerprint, splits, unfinished)
