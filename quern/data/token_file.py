"""Token files on disk and their manifest: how they are read, checked and synced. shard_writer.py writes them.

A damaged, truncated, missing, empty or swapped file raises FileNotFoundError or ValueError with its name.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quern.temporaries import sha256_of, sync_path, write_whole

MAGIC = 20240520
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
VERSIONS = {1: np.dtype("<u2"), 2: np.dtype("<u4")}
MANIFEST = "manifest.json"


@dataclass
class TokenFile:
    """Consecutive tokens of one file, or an array in memory.

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


def map_tokens(path: Path, headerless: bool) -> TokenFile:
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
        return TokenFile(np.frombuffer(mapped, dtype=dtype, count=count, offset=HEADER_BYTES), (mapped,))
    if not headerless:
        raise ValueError(f"{path} is damaged: it does not begin with the magic number {MAGIC}")
    if size % 2:
        raise ValueError(f"{path} is neither a token file with a header nor bare uint16: {size:,} bytes is odd")
    return TokenFile(np.frombuffer(mapped, dtype="<u2"), (mapped,))


def map_mask(part: TokenFile, path: Path) -> TokenFile:
    """The file with its mask, one byte for each token. Raises ValueError if their numbers differ."""
    if path.stat().st_size != len(part.tokens):
        raise ValueError(f"{path} has not one byte for each token; prepare the data again")
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return TokenFile(part.tokens, (*part.maps, mapped), np.frombuffer(mapped, dtype=bool))


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
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); prepare the data again") from error
    if not isinstance(manifest, dict) or manifest.get("version") != 1 or "splits" not in manifest:
        raise ValueError(f"{path} is damaged or from another version; prepare the data again")
    return manifest


def write_manifest(folder: Path, fingerprint: str, splits: dict[str, Any], unfinished: dict[str, Any]) -> None:
    """Writes the manifest. unfinished: the splits whose writer has finished some shards, which no reader opens."""
    manifest = {"version": 1, "fingerprint": fingerprint, "splits": splits, "unfinished": unfinished}
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))
    sync_path(folder)
