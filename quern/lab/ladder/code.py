"""The fingerprint of the code that an arm trains with, so that a study continues only with the same code."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import quern

ROOT = Path(quern.__file__).parent
ROOTS = ("quern.train.loop", "quern.train.state", "quern.data.loader", "quern.eval.bits_per_byte")
"""Modules that every trial runs."""
ROOMS = tuple(
    "quern." + room for room in "model kernels optim recipes data resolve train.loop train.state grug".split()
)
"""Modules whose code decides what a trial learns; a fingerprint follows imports through these alone."""


def code_fingerprint(source: str | None) -> str:
    """Returns 16 hex digits of the code of an idea's file and of those modules of quern that it trains with.

    Docstrings, comments and the layout of the text do not count.

    Args:
        source: The text of the idea's file; None for a recipe of quern.
    """
    digest = hashlib.sha256()
    own, imports = _parsed(source or "")
    digest.update(own.encode())
    waiting, seen = [*ROOTS, *imports], set[str]()
    while waiting:
        name = waiting.pop()
        path = _path(name)
        if name in seen or path is None or not (name in ROOTS or name.startswith(ROOMS)):
            continue
        seen.add(name)
        waiting += _module(path)[1]
    for name in sorted(seen):
        path = _path(name)
        assert path
        digest.update(f"{name}\n{_module(path)[0]}\n".encode())
    return digest.hexdigest()[:16]


def _path(module: str) -> Path | None:
    if not module.startswith("quern"):
        return None
    stem = ROOT.joinpath(*module.split(".")[1:])
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@cache
def _module(path: Path) -> tuple[str, list[str]]:
    return _parsed(path.read_text(encoding="utf-8"))


def _parsed(source: str) -> tuple[str, list[str]]:
    """The code as text without docstrings, and the modules that it imports."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # pyright: ignore[reportAttributeAccessIssue]
    return ast.dump(tree), list(_imports(tree))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
