"""The rungs of the ladder, and the fingerprints of what trains on them: a recipe's numbers, and an idea's code.

Rungs are sizes on the baseline's compute-optimal line, about a factor of four in FLOPs apart. Every rung reads its text
once, and trains its whole schedule. All share one vocabulary and one context: both change the loss by themselves.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import quern
from quern.recipe import OPERATIONAL, Recipe
from quern.resolve import resolve


@dataclass(frozen=True)
class Rung:
    """A size, and how long it trains. Units: layers, channels, tokens, optimizer steps; None leaves it to the arm."""

    steps: int
    batch_tokens: int
    depth: int | None = None
    width: int | None = None
    head_dim: int | None = None
    context: int | None = None
    vocab_size: int | None = None


RUNGS: Mapping[int, Rung] = {
    0: Rung(400, 4096, depth=4, width=96, head_dim=32, context=256, vocab_size=4096),
    1: Rung(800, 4096, depth=6, width=128, head_dim=32, context=256, vocab_size=4096),
    2: Rung(1600, 4096, depth=6, width=192, head_dim=32, context=256, vocab_size=4096),
    3: Rung(1600, 8192, depth=8, width=256, head_dim=64, context=256, vocab_size=4096),
}
"""By number. Two tokens for each parameter of matrices and head on every rung: of the sizes that train for 80 s on one
core, those with more tokens score better at equal FLOPs, but hardly better than a trigram (docs/ladder.md)."""

UNRELATED = ("schema", "name", "data", "val", "conversations", "sft", "rl", "shards", "seed", "data_seed")
"""Parts of a recipe that do not decide what a trial learns, or that its record names apart."""


def at_rung(recipe: Recipe, rung: Rung) -> Recipe:
    """Returns the recipe at a rung's size and length. The rung sets the depth; other settings of the recipe stay. An
    idea with a batch of its own reads as many tokens. Raises ValueError if the recipe sets the width: it is an idea
    about one size."""
    shape, text, train = recipe.model, recipe.text, recipe.train
    if shape.width is not None and rung.width is not None:
        raise ValueError(f"{recipe.name} sets model.width, as a rung does: compare it at one size, without --ladder")
    sizes = {name: getattr(shape, name) or getattr(rung, name) for name in ("width", "head_dim", "context")}
    batch = train.batch_tokens or rung.batch_tokens
    return replace(
        recipe,
        depth=rung.depth or recipe.depth,
        model=replace(shape, **sizes),
        text=replace(text, vocab_size=text.vocab_size or rung.vocab_size),
        train=replace(train, steps=max(1, round(rung.steps * rung.batch_tokens / batch)), batch_tokens=batch),
    )


def numbers(recipe: Recipe) -> str:
    """Returns 16 hex digits of a recipe's resolved numbers. Verdicts on others are on an old baseline."""
    body: dict[str, Any] = resolve(recipe).to_json()
    for name in UNRELATED:
        body.pop(name, None)
    for name in OPERATIONAL:
        part, _, field = name.partition(".")
        body[part].pop(field, None)
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def one_size(base: Recipe) -> dict[int, Rung]:
    """Returns the rungs of a comparison at one size: the baseline's own length, and one that is half as long again,
    which tells how its loss falls with compute."""
    train = resolve(base).train
    return {0: Rung(train.steps, train.batch_tokens), 1: Rung(-(-train.steps * 3 // 2), train.batch_tokens)}


# The fingerprint of code -----------------------------------------------------------------------------------

ROOT = Path(quern.__file__).parent
ROOTS = ("quern.train.loop", "quern.train.state", "quern.data.loader", "quern.eval.bits_per_byte")
"""Modules that every trial runs."""
ROOMS = tuple(
    "quern." + room for room in "model kernels optim recipes data resolve train.loop train.state grug".split()
)
"""Modules whose code decides what a trial learns; a fingerprint follows imports through these alone."""


def code_fingerprint(source: str | None) -> str:
    """Returns 16 hex digits of the code of an idea's file (None for a recipe of quern) and of quern's modules that it
    trains with. Docstrings, comments and the layout of the text do not count."""
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
