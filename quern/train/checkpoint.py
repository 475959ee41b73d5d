"""Checkpoints: a training state on disk that is either complete or absent, and verifiable.

A checkpoint is a folder `step-00000100` of safetensors files and one `manifest.json` (manifest.py). A save writes to
`step-00000100.tmp-<id>`, fsyncs the files, writes the manifest last, fsyncs the folder, renames it, fsyncs the parent,
and only then removes checkpoints older than the newest `keep` complete ones. So a crash at any point leaves every
earlier checkpoint intact. Reading checks every hash, because the readers of safetensors load a flipped byte silently.

The format is the one of torch.distributed.checkpoint's Hugging Face storage, without its import, which takes half a
second. On a mesh every rank writes its slices and hashes its files, and rank 0 does the rest.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as serialized

from quern.mesh import Mesh, ProcessGroup, alone
from quern.parallel.sharding import Slice
from quern.temporaries import sha256_of, sync_path
from quern.train.manifest import FOLDER, CheckpointError, candidates, is_kept, read_manifest, verify, write_manifest

OFFSETS = "DCP_SHARDING_INFO"
"""The key of a safetensors header under which JSON gives name → saved_offsets."""
_TRASH = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")
Tensors = Mapping[str, torch.Tensor | Slice]


def save(
    folder: Path,
    step: int,
    tensors: Tensors | Sequence[Tensors],
    meta: dict[str, Any],
    keep: int,
    mesh: Mesh | None = None,
) -> Path:
    """Writes a checkpoint, which is durable when this returns. Every rank of the mesh calls this.

    Args:
        tensors: Any dtype, shape and device, saved bit for bit; shared storage is written once per name. On a mesh,
            the slices that this rank holds; in a sequence, the slices of each file.
        meta: Plain JSON (string keys, lists not tuples, finite numbers), so that it reads back equal; rank 0's is
            saved. With a true `kept`, this checkpoint is never removed, and later saves do not count it.
        keep: Number of complete checkpoints to leave, this one included. They are verified before any is removed.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: on all ranks, when the disk is full or read-only. Earlier checkpoints are then untouched.
    """
    if json.loads(json.dumps(meta, allow_nan=False)) != meta:
        raise ValueError("meta must read back equal: use string keys and lists, not tuples or numbers as keys")
    mesh = mesh or alone()
    world, final = mesh.world, folder / f"step-{step:08d}"
    temporary = folder / world.broadcast_object(f"{final.name}.tmp-{uuid.uuid4().hex}")
    parts = [_owned(part, mesh.main) for part in ([tensors] if isinstance(tensors, Mapping) else tensors)]
    needed = sum(world.gather_objects(sum(part.tensor.nbytes for own in parts for part in own.values())))
    refused = partial(_write_error, folder, step, needed)
    with failing_together(world, refused):
        if mesh.main:
            folder.mkdir(parents=True, exist_ok=True)
            _clean(folder)
            temporary.mkdir()
    try:
        found: dict[str, dict[str, Any]] = {}
        with failing_together(world, refused):
            for number, own in enumerate(parts, start=1):
                name = f"shard-{world.rank + 1:05d}-model-{number:05d}-of-{len(parts):05d}.safetensors"
                if own:
                    _write_tensors(temporary / name, own)
                    found[name] = {"bytes": (temporary / name).stat().st_size, "sha256": sha256_of(temporary / name)}
        gathered = world.gather_objects(found)
        with failing_together(world, refused):
            if mesh.main:
                facts = dict(sorted((name, one) for part in gathered for name, one in part.items()))
                write_manifest(temporary, step, facts, meta, torch.__version__)
                _put_in_place(temporary, final)
    except CheckpointError:
        shutil.rmtree(temporary, ignore_errors=True)  # best effort: the next save cleans up too
        raise
    with failing_together(world, lambda error: f"{final} was saved, but an older one cannot be removed: {error}"):
        if mesh.main:
            _prune(folder, final, keep)
    return final


def load(path: Path, *, verified: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns (whole tensors on the CPU, meta) of a checkpoint. Raises as `read_manifest`, and CheckpointError for
    files that hold no tensors.

    verified: another rank has just checked the hashes.
    """
    manifest = read_manifest(path) if verified else verify(path)
    try:
        return _read_tensors(path, manifest["files"]), manifest["meta"]
    except Exception as error:  # the manifest's hashes are right: another program made the files
        raise CheckpointError(f"{path} holds no tensors that can be read: {' '.join(str(error).split())}") from error


def _read_tensors(path: Path, files: Iterable[str]) -> dict[str, torch.Tensor]:
    """Puts the slices in a checkpoint's files together. Raises ValueError unless they fill every tensor."""
    parts: list[tuple[str, Any, list[int], list[int]]] = []
    whole: dict[str, list[int]] = {}
    with ExitStack() as opened:
        for file in sorted(files):
            content: Any = opened.enter_context(safe_open(path / file, framework="pt"))
            offsets = json.loads(content.metadata()[OFFSETS])
            for name in content.keys():  # noqa: SIM118  # no dict
                begin, shape = offsets[name]["saved_offsets"], content.get_slice(name).get_shape()
                end = [first + size for first, size in zip(begin, shape, strict=True)]
                whole[name] = [max(sizes) for sizes in zip(end, whole.get(name, end), strict=True)]
                parts.append((name, content, begin, shape))
        held = Counter[str]()
        for name, _, _, shape in parts:
            held[name] += math.prod(shape)
        # Before memory is taken: a header can claim any offset.
        if wrong := [name for name, shape in whole.items() if held[name] != math.prod(shape)]:
            raise ValueError(f"the slices of {wrong[0]} do not fill it")
        tensors: dict[str, torch.Tensor] = {}
        for name, content, begin, shape in parts:
            part = content.get_tensor(name)
            if name not in tensors:
                tensors[name] = torch.empty(whole[name], dtype=part.dtype)
            tensors[name][tuple(slice(first, first + size) for first, size in zip(begin, shape, strict=True))] = part
    return tensors


# Writing ----------------------------------------------------------------------------------------------------


def _unwritten(error: OSError) -> str:
    return f"cannot write {error.filename}: {error.strerror}. Saved checkpoints are intact: make room, then resume."


@contextmanager
def failing_together(world: ProcessGroup, describe: Callable[[OSError], str] = _unwritten) -> Iterator[None]:
    """Turns an OSError of any rank into a CheckpointError on all, so that no rank waits for the one that failed."""
    failure: OSError | None = None
    try:
        yield
    except OSError as error:
        failure = error
    messages = world.gather_objects(None if failure is None else describe(failure))
    if said := [message for message in messages if message is not None]:
        raise CheckpointError(said[0]) from failure


def _owned(tensors: Tensors, main: bool) -> dict[str, Slice]:
    """The slices that this rank writes; rank 0 writes tensors that every rank has whole."""
    slices = {
        name: one if isinstance(one, Slice) else Slice(one, (0,) * one.ndim, tuple(one.shape), saved=main)
        for name, one in tensors.items()
    }
    return {name: part for name, part in slices.items() if part.saved}


def _write_tensors(file: Path, slices: Mapping[str, Slice]) -> None:
    """Writes and syncs a file of this rank. Its header has the offsets of the slices."""
    written: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, part in slices.items():
        value = part.tensor.detach().cpu().contiguous()
        address = value.untyped_storage().data_ptr()
        written[name] = value.clone() if address in storages else value  # safetensors refuses shared memory
        storages.add(address)
    offsets = {name: {"saved_offsets": list(part.offsets)} for name, part in slices.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps(offsets)}
    file.write_bytes(serialized(written, metadata))
    with open(file, "r+b") as opened:  # safetensors writes the keys in a random order
        opened.seek(8 + len('{"__metadata__":'))
        opened.write(json.dumps(metadata, separators=(",", ":")).encode())
    sync_path(file)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Renames into place. One rename cannot replace a folder, so an earlier save of this step is renamed first."""
    aside = final.with_name(f"{final.name}.old-{uuid.uuid4().hex}")
    if final.exists():
        os.rename(final, aside)
    os.rename(temporary, final)
    sync_path(final.parent)
    if aside.exists():
        _remove(aside)


def _prune(folder: Path, saved: Path, keep: int) -> None:
    """Removes checkpoints older than the newest `keep` complete ones; `saved` counts and is never removed."""
    complete = {step: path for step, path in candidates(folder).items() if path == saved or not is_kept(path)}
    if len(complete) <= keep:
        return
    whole = 1
    for path in (complete[step] for step in sorted(complete, reverse=True) if complete[step] != saved):
        if whole >= keep:
            _remove(path)
            continue
        with suppress(CheckpointError):
            verify(path)
            whole += 1


def _remove(path: Path) -> None:
    """Removes a checkpoint. One rename hides it first, so that a partly removed one is never visible."""
    trash = path.with_name(f"{path.name.partition('.')[0]}.tmp-{uuid.uuid4().hex}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)  # the next save removes files that a network file system still holds


def _clean(folder: Path) -> None:
    """Removes the remains of crashed saves, and restores an earlier save whose replacement is missing."""
    for path in sorted(folder.iterdir()):
        if _TRASH.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
            continue
        match = FOLDER.fullmatch(path.name)
        if match and match["old"]:
            final = path.with_name(path.name.partition(".")[0])
            if final.exists():
                _remove(path)
            else:
                os.rename(path, final)


def _write_error(folder: Path, step: int, needed: int, error: OSError) -> str:
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    make = "Those before it are intact: make" if candidates(folder) else "Make"
    return (
        f"cannot write the checkpoint of step {step} to {folder}: {error.strerror or error}. It needs about "
        f"{needed:,} bytes, {free:,} are free there. {make} room, then resume."
    )
