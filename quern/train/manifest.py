"""The manifest of a checkpoint: its format, and how it is written and read.

JSON: schema version, step, torch's version, the caller's JSON (`meta`), size in bytes and SHA-256 of each file, and the
SHA-256 of all of that. checkpoint.py handles folders and tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quern.data.token_file import sync_path

SCHEMA = 1
MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged. The message names it and the reason."""


class NewerCheckpointError(CheckpointError):
    """The checkpoint is complete, but a newer version wrote it, which this version cannot read."""


def write_manifest(
    temporary: Path, step: int, files: dict[str, dict[str, Any]], meta: dict[str, Any], at: Callable[[str], None]
) -> None:
    """Writes the manifest. It and the folder are durable when this returns. files: `describe` of each, by name."""
    content = {"schema": SCHEMA, "step": step, "torch": torch.__version__, "files": files, "meta": meta}
    manifest = temporary / MANIFEST
    at("write manifest")
    text = json.dumps(content | {"sha256": _content_hash(content)}, indent=1, allow_nan=False)
    manifest.write_text(text + "\n", encoding="utf-8")
    at("fsync manifest")
    sync_path(manifest)
    at("fsync temporary folder")
    sync_path(temporary)


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest, its own hash checked. Raises CheckpointError or NewerCheckpointError."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    # The hash covers the content without itself in every schema, so a damaged schema number is not taken for a newer
    # version.
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _content_hash(manifest):
        raise CheckpointError(f"{file} does not match its own sha256")
    if manifest["schema"] > SCHEMA:
        raise NewerCheckpointError(
            f"{path} has checkpoint schema {manifest['schema']}, this version reads up to {SCHEMA}: "
            "update quern, or move this checkpoint away to go on from an earlier one"
        )
    return manifest


def _content_hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def describe(file: Path) -> dict[str, Any]:
    """Returns the size and hash of a file, as in the manifest."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}


def require_plain_json(meta: dict[str, Any]) -> None:
    """Raises ValueError unless `meta` reads back equal."""
    try:
        same = json.loads(json.dumps(meta, allow_nan=False)) == meta
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta must be plain JSON: {error}") from error
    if not same:
        raise ValueError("meta must read back equal: use string keys and lists, not tuples or numbers as keys")
