"""The manifest of a checkpoint: its format, and how it is written and read. The checkpoints of a folder.

JSON: schema version, step, version of the library that wrote it, the caller's JSON (`meta`), size in bytes and SHA-256
of each file, and the SHA-256 of all that. This file knows nothing of tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from quern.records import FileFacts, FilePath, Natural, read_json, typed
from quern.temporaries import sha256_of, sync_path

SCHEMA = 1
MANIFEST = "manifest.json"


class Manifest(TypedDict):
    """A manifest. meta: the caller's JSON."""

    schema: int
    step: Natural
    files: dict[FilePath, FileFacts]
    meta: dict[str, Any]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged. The message names it and the reason."""


def write_manifest(
    temporary: Path, step: int, files: dict[str, dict[str, Any]], meta: dict[str, Any], torch: str
) -> None:
    """Writes and syncs the manifest, then syncs the folder, which has its temporary name.

    files: size in bytes and hash of each file, by name; torch: the version of the library that wrote the files.
    """
    content = {"schema": SCHEMA, "step": step, "torch": torch, "files": files, "meta": meta}
    manifest = temporary / MANIFEST
    text = json.dumps(content | {"sha256": _content_hash(content)}, indent=1, allow_nan=False)
    manifest.write_text(text + "\n", encoding="utf-8")
    sync_path(manifest)
    sync_path(temporary)


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest. Raises CheckpointError for a damaged one, ValueError for a newer schema."""
    file = path / MANIFEST
    try:
        manifest = read_json(file, dict[str, Any])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    # The hash covers the content without itself in every schema, so a damaged schema number is not taken for a newer
    # version.
    if manifest.pop("sha256", None) != _content_hash(manifest):
        raise CheckpointError(f"{file} does not match its own sha256")
    if isinstance(schema := manifest.get("schema"), int) and schema > SCHEMA:
        raise ValueError(f"{path} has schema {schema}, this version reads up to {SCHEMA}: update quern or move it away")
    try:
        return dict(typed(manifest, Manifest))
    except ValueError as error:
        raise CheckpointError(f"{file} is not a manifest: {error}") from error


def _content_hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


# `.old-` exists only between the two renames that replace a step by a new save of the same step.
FOLDER = re.compile(r"step-(\d{8,})(?P<old>\.old-[0-9a-f]+)?")


def steps(folder: Path) -> list[int]:
    """Returns the steps with a checkpoint folder, ascending, unverified; empty when `folder` does not exist."""
    return sorted(candidates(folder))


def path_of(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of `step`. Raises CheckpointError when there is none."""
    found = candidates(folder)
    if step not in found:
        raise CheckpointError(f"{folder} has no checkpoint of step {step}: there are {sorted(found)}")
    return found[step]


def latest(folder: Path, report: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """Returns (path, manifest) of the newest checkpoint that verifies; None when there is none.

    report: takes a line for each damaged checkpoint that is skipped. Raises ValueError for a schema that this version
    cannot read.
    """
    for step, path in sorted(candidates(folder).items(), reverse=True):
        try:
            return path, verify(path)
        except CheckpointError as error:
            report(f"step {step} is damaged and is skipped: {error}")
    return None


def verify(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, after checking every size and hash. Raises as `read_manifest`."""
    manifest = read_manifest(path)
    named = FOLDER.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(f"{path} holds step {manifest['step']}, not the step it is named after")
    for name, expected in manifest["files"].items():
        try:
            info = (path / name).stat()
            if not stat.S_ISREG(info.st_mode) or info.st_size != expected["bytes"]:
                raise CheckpointError(f"{path / name} is no file of {expected['bytes']:,} bytes")
            if (found := sha256_of(path / name)) != expected["sha256"]:
                raise CheckpointError(f"{path / name} has sha256 {found}, not {expected['sha256']}")
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror or error}") from error
    return manifest


def candidates(folder: Path) -> dict[int, Path]:
    """Returns step → folder; the replaced folder only where its replacement is missing."""
    found: dict[int, Path] = {}
    if not folder.is_dir():
        return found
    for path in sorted(folder.iterdir(), key=lambda path: ".old-" in path.name):
        match = FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found.setdefault(int(match[1]), path)
    return found


def is_kept(path: Path) -> bool:
    try:
        return bool(read_manifest(path)["meta"].get("kept"))
    except CheckpointError:
        return False
