"""The checkpoints that are whole on disk, told by the package safetensors alone, never by the manifest under test."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quern.train.checkpoint import save


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """A folder where an fsync costs nothing, if this machine has one: thousands of saves happen in it."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
        yield Path(folder)


@contextmanager
def watched(at: Callable[[str], None]) -> Iterator[None]:
    """Calls `at` with the name of each change of the disk before it happens."""

    def announced(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            at(name)
            return change(*arguments, **options)

        return call

    changes = {os: ("rename", "fsync"), shutil: ("rmtree",), Path: ("mkdir", "write_bytes", "write_text")}
    with ExitStack() as stack:
        for owner, name in ((owner, name) for owner, names in changes.items() for name in names):
            stack.enter_context(patch.object(owner, name, announced(name, getattr(owner, name))))
        yield


def tensors_of(identity: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((2000,), identity)}


def put(folder: Path, step: int, identity: int, keep: int = 10) -> Path:
    return save(folder, step, tensors_of(identity), {"id": identity}, keep)


def identity_of(path: Path) -> int | None:
    """The identity of a whole checkpoint; None for one that is damaged. Reads nothing the way quern does."""
    if not (path / "manifest.json").exists():
        return None
    files = sorted(path.glob("*.safetensors"))
    try:
        (x,) = load_file(files[0])["x"].unique().tolist()
    except (IndexError, ValueError, SafetensorError):
        return None
    text = (path / "manifest.json").read_text(encoding="utf-8")
    return x if f'"id": {x}\n' in text else None


def on_disk(folder: Path) -> dict[int, int]:
    """Step → identity of what is whole on disk, one that stepped aside counted where it is the only one."""
    found: dict[int, int] = {}
    for path in sorted(folder.glob("step-*"), key=lambda path: ".old-" in path.name):
        identity = identity_of(path) if ".tmp-" not in path.name else None
        if identity is not None and not (".old-" in path.name and path.with_suffix("").exists()):
            found[int(path.name[5:13])] = identity
    return found


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".tmp-" in path.name or ".old-" in path.name]
