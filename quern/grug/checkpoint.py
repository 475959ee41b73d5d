"""Checkpoints in TensorStore, through orbax: whole or absent, verified, written in the background.

A checkpoint is a folder `step-00000100` that holds orbax's own folder `state` and, written last, `manifest.json`:
size and SHA-256 of each file, and the caller's JSON (recipe, tokenizer, counters). It is made under a temporary name,
synced, renamed; only then older ones go. Reading passes over a damaged one, which it names. Arrays are restored cut
for the mesh at hand, whichever mesh they were saved from.

With several processes each writes its own parts; process 0 writes the manifest and renames.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import same_everywhere, wait_for_all

SCHEMA = 1
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.tmp-.*")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be trusted; the message says which, and why."""


class JaxSaver:
    """Writes checkpoints of one folder, one at a time, beside the training that goes on. Use it in a `with`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder.absolute(), keep
        self._orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Copies the state to the host, returns, and writes behind the caller's back.

        Waits for the save before this one, and raises CheckpointError when that one failed."""
        self.wait()
        name = f"step-{step:08d}"
        temporary = self.folder / f"{name}.tmp-{same_everywhere(uuid.uuid4().hex)}"
        if jax.process_index() == 0:
            _clean(self.folder)
            temporary.mkdir(parents=True)
        wait_for_all(f"made {temporary.name}")
        self._orbax.save(temporary / "state", args=ocp.args.StandardSave(state))
        self._pending = self._thread.submit(self._finish, temporary, self.folder / name, step, meta)

    def wait(self) -> None:
        """Until the last save is on disk. Raises CheckpointError when it is not."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, ValueError, RuntimeError) as error:  # TensorStore's are ValueErrors
            raise CheckpointError(
                f"cannot write a checkpoint to {self.folder}: {error}. Those before it are intact: make room, resume"
            ) from error

    def _finish(self, temporary: Path, final: Path, step: int, meta: dict[str, Any]) -> None:
        self._orbax.wait_until_finished()
        if jax.process_index() != 0:
            return
        files = {str(path.relative_to(temporary)): _describe(path) for path in _files(temporary)}
        content = {"schema": SCHEMA, "step": step, "files": files, "meta": meta}
        text = json.dumps(content | {"sha256": _hash(content)}, indent=1, allow_nan=False)
        (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
        for path in [*_files(temporary), *(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            _sync(path)
        if final.exists():  # the same step again, after a resume from an earlier one
            _remove(final)
        os.rename(temporary, final)
        _sync(self.folder)
        self._prune(final)

    def _prune(self, saved: Path) -> None:
        """Removes what is older than the newest `keep` whole ones; the one just saved counts and never goes."""
        whole = 1
        for step in reversed(steps(self.folder)):
            path = self.folder / f"step-{step:08d}"
            if path == saved:
                continue
            if whole >= self.keep:
                _remove(path)
            elif _is_whole(path):
                whole += 1

    def __enter__(self) -> JaxSaver:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()


def steps(folder: Path) -> list[int]:
    """Steps with a checkpoint folder, ascending, unverified."""
    found = (_FOLDER.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted(int(match[1]) for match in found if match)


def latest(folder: Path, report: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """(path, manifest) of the newest checkpoint that verifies; each damaged one on the way is named."""
    for step in reversed(steps(folder)):
        path = folder.absolute() / f"step-{step:08d}"
        try:
            return path, verify(path)
        except CheckpointError as error:
            report(f"step {step} is damaged and is passed over: {error}")
    return None


def verify(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, every size and hash checked. Raises CheckpointError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _hash(manifest):
        raise CheckpointError(f"{path / MANIFEST} does not match its own sha256")
    if manifest["schema"] > SCHEMA:
        raise CheckpointError(f"{path} was written by a newer version of quern: update it")
    there = {str(file.relative_to(path)) for file in _files(path)} - {MANIFEST}
    if there != set(manifest["files"]):
        raise CheckpointError(f"{path} has files too many or too few: {sorted(there ^ set(manifest['files']))[:3]}")
    for name, expected in manifest["files"].items():
        if (found := _describe(path / name)) != expected:
            raise CheckpointError(f"{path / name} is {found}, not {expected}")
    return manifest


def load(path: Path, like: Any, mesh: Mesh) -> Any:
    """The state at `path`, cut over the mesh as `like` (arrays or `jax.ShapeDtypeStruct`) is. Verify it first."""

    def target(x: Any) -> jax.ShapeDtypeStruct:
        spec = P() if x.sharding is None else x.sharding.spec  # tracing leaves out what is whole everywhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with ocp.StandardCheckpointer() as reader:
        return reader.restore(path / "state", jax.tree.map(target, like))


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _clean(folder: Path) -> None:
    """Removes what killed saves left."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """First out of sight in one rename, so that a half-removed checkpoint never shows."""
    trash = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}


def _hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
