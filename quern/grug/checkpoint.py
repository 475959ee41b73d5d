"""Checkpoints of the JAX twin: orbax writes the arrays (TensorStore), in the background of training.

A checkpoint is a folder `step-00000100` with orbax's folder `state` and a `manifest.json` (quern/train/manifest.py),
which is written last. The folder is made under a temporary name, synced and renamed; only then are older checkpoints
removed. Arrays are restored for the current mesh, whichever mesh they were saved from.

With several processes each one writes its own parts. Process 0 writes the manifest and renames.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import same_everywhere, wait_for_all
from quern.temporaries import sync_path
from quern.train.manifest import (
    MANIFEST,
    CheckpointError,
    check_files,
    describe,
    newest_good,
    read_manifest,
    write_manifest,
)

_FOLDER = re.compile(r"step-(\d{8,})")


class JaxSaver:
    """Writes the checkpoints of one folder in the background, one at a time. Use it in a `with`.

    Args:
        folder: The checkpoints.
        keep: How many intact checkpoints remain, the newest included.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder.absolute(), keep
        self._orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Copies the state to the host and returns; a thread writes the copy.

        Args:
            step: The number of finished steps.
            state: A pytree of arrays. The caller may donate them once this returns.
            meta: JSON for the manifest.

        Raises:
            CheckpointError: The previous save failed.
        """
        self.wait()
        name = f"step-{step:08d}"
        temporary = self.folder / f"{name}.tmp-{same_everywhere(uuid.uuid4().hex)}"
        if jax.process_index() == 0:
            for path in self.folder.glob("step-*.tmp-*"):  # of saves that were killed
                shutil.rmtree(path, ignore_errors=True)
            temporary.mkdir(parents=True)
        wait_for_all(f"made {temporary.name}")
        self._orbax.save(temporary / "state", args=ocp.args.StandardSave(state))
        self._pending = self._thread.submit(self._finish, temporary, self.folder / name, step, meta)

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises CheckpointError where that save failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, ValueError, RuntimeError) as error:  # TensorStore raises ValueErrors
            raise CheckpointError(
                f"cannot write a checkpoint to {self.folder}: {error}. Earlier ones are intact: make room, then resume"
            ) from error

    def _finish(self, temporary: Path, final: Path, step: int, meta: dict[str, Any]) -> None:
        self._orbax.wait_until_finished()
        if jax.process_index() != 0:
            return
        files = {str(path.relative_to(temporary)): describe(path) for path in _files(temporary)}
        for path in temporary.rglob("*"):
            sync_path(path)
        write_manifest(temporary, step, files, meta, {"jax": jax.__version__})
        if final.exists():  # a run that resumed from an earlier step saves this step again
            _remove(final)
        os.rename(temporary, final)
        sync_path(self.folder)
        self._prune(final)

    def _prune(self, saved: Path) -> None:
        """Removes checkpoints older than the newest `keep` intact ones, never the one just saved."""
        intact = 1
        for path in reversed(_paths(self.folder).values()):
            if path == saved:
                continue
            if intact >= self.keep:
                _remove(path)
            else:
                with suppress(CheckpointError):
                    verify(path)
                    intact += 1

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
    return list(_paths(folder))


def latest(folder: Path, report: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """Returns path and manifest of the newest checkpoint that verifies, or None; reports each damaged one.

    Raises NewerCheckpointError where an intact checkpoint is newer than this version can read.
    """
    return newest_good(_paths(folder.absolute()), verify, report)


def verify(path: Path) -> dict[str, Any]:
    """Returns the manifest of the checkpoint at `path` after checking every file. Raises CheckpointError."""
    manifest = read_manifest(path)
    found = {str(file.relative_to(path)) for file in _files(path)} - {MANIFEST}
    if foreign := found - set(manifest["files"]):
        raise CheckpointError(f"{path} holds files that its manifest does not list: {sorted(foreign)[:3]}")
    check_files(path, manifest)
    return manifest


def load(path: Path, like: Any, mesh: Mesh) -> Any:
    """Restores the state at `path`, which the caller has verified.

    Args:
        path: The checkpoint.
        like: A pytree of arrays or `jax.ShapeDtypeStruct` that gives shapes, dtypes and sharding.
        mesh: The mesh to place the arrays on.
    """

    def target(x: Any) -> jax.ShapeDtypeStruct:
        spec = P() if x.sharding is None else x.sharding.spec  # tracing omits the sharding of replicated arrays
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with ocp.StandardCheckpointer() as reader:
        return reader.restore(path / "state", jax.tree.map(target, like))


def _paths(folder: Path) -> dict[int, Path]:
    """Checkpoint folders by step, ascending."""
    found = ((_FOLDER.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _remove(path: Path) -> None:
    """Renames the checkpoint first, so that a half-removed one is never visible."""
    trash = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
