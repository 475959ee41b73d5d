"""Token files on disk and their manifest. shard_writer.py writes them, shards.py reads them.

A folder has, for each split, `<split>-00000.bin`, `<split>-00000.starts.npy`, …, and one `manifest.json` for all. A
.bin file is 256 int32 (magic 20240520, version, token count), then the tokens: uint16 (version 1, the format of
llm.c and modded-nanogpt) or uint32 (version 2, for vocabularies above 65,536). The .starts.npy file has the index
of the first token of each document, int64. A document starts with BOS and is in one file. Where not every token is to
be learned, .mask has a byte for each token: 1 to learn it, else 0. The manifest has the size and SHA-256 of each file,
and a fingerprint of the tokenizer and the source.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import numpy as np

from quern.records import FileFacts, FileName, Natural, read_json
from quern.temporaries import sha256_of, sync_path, write_whole

MAGIC = 20240520
HEADER_BYTES = 1024
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
    paths = [(folder / file["name"], file["bytes"]) for file in files]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def header(count: int, dtype: np.dtype) -> bytes:
    """The header of a token file."""
    version = next(version for version, known in VERSIONS.items() if known == dtype)
    return np.array([MAGIC, version, count], dtype="<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def map_tokens(path: Path, headerless: bool = False) -> np.ndarray:
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
        magic, version, count = np.frombuffer(file.read(12).ljust(12, b"\0"), dtype="<i4").tolist()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if magic == MAGIC:
        if version not in VERSIONS:
            raise ValueError(f"{path} has version {version}; known are {sorted(VERSIONS)}")
        if count < 1 or size != HEADER_BYTES + count * VERSIONS[version].itemsize:
            raise ValueError(f"{path} is damaged: its header says {count:,} tokens, its size is {size:,} bytes")
        return np.frombuffer(mapped, dtype=VERSIONS[version], offset=HEADER_BYTES)
    if not headerless:
        raise ValueError(f"{path} is damaged: it does not begin with the magic number {MAGIC}")
    if size % 2:
        raise ValueError(f"{path} is neither a token file with a header nor bare uint16: {size:,} bytes is odd")
    return np.frombuffer(mapped, dtype="<u2")


def split_files(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """All files of one split of a manifest."""
    return [file for shard in entry["files"] for file in (shard, shard["starts"], shard.get("mask")) if file]


def describe(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file: name, size and SHA-256."""
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def check(folder: Path, expected: dict[str, Any], verify: bool) -> Path:
    """Compares a file with its entry, the hash only with `verify`, and returns its path.

    Raises:
        FileNotFoundError, ValueError: It is missing or damaged.
    """
    path = folder / expected["name"]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; prepare the data again")
    if path.stat().st_size != expected["bytes"]:
        sizes = f"{path.stat().st_size:,} bytes instead of {expected['bytes']:,}"
        raise ValueError(f"{path} is damaged: {sizes}; prepare the data again")
    if verify and sha256_of(path) != expected["sha256"]:
        raise ValueError(f"{path} is damaged or was swapped: its hash is not the manifest's; prepare the data again")
    return path


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
