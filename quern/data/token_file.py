"""Token files on disk and their manifest: how they are read, checked and synced. shard_writer.py writes them.

A damaged, truncated, missing, empty or swapped file raises FileNotFoundError or ValueError with its name.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Protocol, TypedDict

import msgspec
import numpy as np

from quern.records import FileFacts, FileName, Natural, read_json
from quern.temporaries import sha256_of, sync_path, write_whole

MAGIC = 20240520
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
VERSIONS = {1: np.dtype("<u2"), 2: np.dtype("<u4")}
MANIFEST = "manifest.json"
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**62)]


class NamedFile(FileFacts):
    """The entry of a file in a manifest."""

    name: FileName


class Shard(NamedFile):
    """The entry of a shard with its index and its mask."""

    tokens: Positive
    documents: Positive
    starts: NamedFile
    mask: NotRequired[NamedFile]


class Split(TypedDict):
    """The entry of a split."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: Positive
    bos: Natural
    documents: NotRequired[Natural]
    tokens: NotRequired[Natural]
    files: list[Shard]


class Manifest(TypedDict):
    """The manifest of prepared data."""

    version: Literal[1]
    fingerprint: str
    splits: dict[str, Split]
    unfinished: dict[str, Split]


@dataclass
class TokenMap:
    """The tokens of a file that is mapped into memory, or an array in memory.

    Args:
        tokens: (tokens,) ids.
        maps: The memory-mapped files that hold them; none for arrays in memory.
        mask: (tokens,) bool, True where a token is to be learned; None if all are.
    """

    tokens: np.ndarray
    maps: tuple[mmap.mmap, ...] = ()
    mask: np.ndarray | None = None

    @property
    def mapped_bytes(self) -> int:
        return sum(map(len, self.maps))


class TokenFile(Protocol):
    """Consecutive tokens that are mapped when they are read. count: of the tokens; masked: whether they have a mask."""

    @property
    def count(self) -> int: ...

    @property
    def masked(self) -> bool: ...

    def map(self) -> TokenMap: ...


@dataclass(frozen=True)
class InMemory:
    """Tokens that are in memory already."""

    held: TokenMap

    @property
    def count(self) -> int:
        return len(self.held.tokens)

    @property
    def masked(self) -> bool:
        return self.held.mask is not None

    def map(self) -> TokenMap:
        return self.held


class ShardFile:
    """A prepared shard with its index and its mask. Each file is checked once, before it is read.

    Args:
        folder: The folder of the data.
        entry: The shard's entry in the manifest.
        dtype: Of the tokens.
        hashed: Whether files are hashed.

    Raises:
        FileNotFoundError, ValueError: A file is missing or damaged; the message names it. The constructor looks at
            sizes and the header only.
    """

    def __init__(self, folder: Path, entry: dict[str, Any], dtype: str, hashed: bool) -> None:
        self.folder, self.path, self.hashed = folder, folder / entry["name"], hashed
        self.count, self.documents, self.masked = int(entry["tokens"]), int(entry["documents"]), "mask" in entry
        self._index, self._tokens = [entry["starts"]], [entry, *([entry["mask"]] if self.masked else [])]
        self._checked: set[str] = set()
        for file in (*self._index, *self._tokens):
            check(folder / file["name"], file, verify=False)
        tokens = map_tokens(self.path, headerless=False).tokens
        if tokens.dtype.name != dtype or len(tokens) != self.count:
            raise ValueError(f"{self.path} does not match the manifest; prepare it again")

    def verify(self) -> int:
        """Checks all files, and returns the bytes that were hashed."""
        self.starts()
        self._check(self._tokens)
        return sum(file["bytes"] for file in (*self._index, *self._tokens)) if self.hashed else 0

    def map(self) -> TokenMap:
        tokens, *mask = self._check(self._tokens)
        held = map_tokens(tokens, headerless=False)
        return map_mask(held, mask[0]) if mask else held

    def starts(self) -> np.ndarray:
        new = self._index[0]["name"] not in self._checked
        (path,) = self._check(self._index)
        try:
            starts = np.load(path, mmap_mode="r", allow_pickle=False)
            sound = starts.shape == (self.documents,) and starts.dtype == np.int64
        except (ValueError, EOFError):
            starts, sound = np.empty(0), False
        if new and not (sound and starts[0] == 0 and (np.diff(starts, append=self.count) > 0).all()):
            self._checked.remove(path.name)
            raise ValueError(f"{path} does not match {self.path.name}; prepare it again")
        return starts

    def _check(self, files: list[dict[str, Any]]) -> list[Path]:
        """The paths of files, whose contents are as they were written."""
        for file in files:
            if file["name"] not in self._checked:
                check(self.folder / file["name"], file, self.hashed)
                self._checked.add(file["name"])
        return [self.folder / file["name"] for file in files]


def map_tokens(path: Path, headerless: bool) -> TokenMap:
    """Maps a .bin file into memory.

    Args:
        path: The file.
        headerless: Whether a file without the magic number is read as bare uint16.

    Raises:
        FileNotFoundError, ValueError: The file is missing, empty or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty")
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES), dtype="<i4", count=min(3, size // 4))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(header) == 3 and header[0] == MAGIC:
        version, count = int(header[1]), int(header[2])
        if version not in VERSIONS:
            raise ValueError(f"{path} has version {version}; known are {sorted(VERSIONS)}")
        dtype = VERSIONS[version]
        if count < 1 or size != HEADER_BYTES + count * dtype.itemsize:
            raise ValueError(f"{path} is damaged: its header says {count:,} tokens, its size is {size:,} bytes")
        return TokenMap(np.frombuffer(mapped, dtype=dtype, count=count, offset=HEADER_BYTES), (mapped,))
    if not headerless:
        raise ValueError(f"{path} is damaged: it does not begin with the magic number {MAGIC}")
    if size % 2:
        raise ValueError(f"{path} is neither a token file with a header nor bare uint16: {size:,} bytes is odd")
    return TokenMap(np.frombuffer(mapped, dtype="<u2"), (mapped,))


def map_mask(part: TokenMap, path: Path) -> TokenMap:
    """The file with its mask, one byte for each token. Raises ValueError if their numbers differ."""
    if path.stat().st_size != len(part.tokens):
        raise ValueError(f"{path} has not one byte for each token; prepare the data again")
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return TokenMap(part.tokens, (*part.maps, mapped), np.frombuffer(mapped, dtype=bool))


def find(tokens: np.ndarray, bos: int, step: int = 1 << 24) -> np.ndarray:
    """Indices of `bos`, int64. It reads `step` tokens at a time, so that no mask of the whole file is in memory."""
    pieces = [np.flatnonzero(tokens[at : at + step] == bos) + at for at in range(0, len(tokens), step)]
    return np.concatenate(pieces).astype(np.int64)


def split_files(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """All files of one split of a manifest."""
    return [file for shard in entry["files"] for file in (shard, shard["starts"], shard.get("mask")) if file]


def describe(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file: name, size and SHA-256."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def check(path: Path, expected: dict[str, Any], verify: bool) -> None:
    """Compares a file with its entry; the hash only with `verify`. Raises FileNotFoundError or ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; prepare the data again")
    if path.stat().st_size != expected["bytes"]:
        sizes = f"{path.stat().st_size:,} bytes instead of {expected['bytes']:,}"
        raise ValueError(f"{path} is damaged: {sizes}; prepare the data again")
    if verify and sha256_of(path) != expected["sha256"]:
        raise ValueError(f"{path} is damaged or was swapped: its hash is not the manifest's; prepare the data again")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. Raises FileNotFoundError or ValueError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the data was not prepared, or not to the end; prepare it again")
    return dict(read_json(path, Manifest, "prepare the data again"))


def write_manifest(folder: Path, fingerprint: str, splits: dict[str, Any], unfinished: dict[str, Any]) -> None:
    """Writes the manifest. unfinished: the splits whose writer has finished some shards, which no reader opens."""
    manifest = {"version": 1, "fingerprint": fingerprint, "splits": splits, "unfinished": unfinished}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))
    sync_path(folder)
