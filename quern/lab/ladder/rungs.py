"""The rungs of the ladder: sizes on the baseline's compute-optimal line, about a factor of four in FLOPs apart.

Every rung reads its text once, and trains its whole schedule. All rungs share one vocabulary and one context, because
both change the loss by themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quern.recipe import OPERATIONAL, Recipe
from quern.resolve import resolve


@dataclass(frozen=True)
class Rung:
    """A size, and how long it trains. Units: layers, channels, tokens, optimizer steps; None leaves it to the arm.
    pair_sd: standard deviation of a pair's difference, bits per byte, where it was measured."""

    steps: int
    batch_tokens: int
    depth: int | None = None
    width: int | None = None
    head_dim: int | None = None
    context: int | None = None
    vocab_size: int | None = None
    pair_sd: float | None = None


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
    """Returns the recipe at a rung's size and length. The rung sets the depth; other settings of the recipe stay.

    Raises:
        ValueError: Recipe and rung both set the width: the recipe is an idea about one size.
    """
    shape, text, train = recipe.model, recipe.text, recipe.train
    if shape.width is not None and rung.width is not None:
        raise ValueError(f"{recipe.name} sets model.width, as a rung does: compare it at one size, without --ladder")
    return replace(
        recipe,
        depth=rung.depth or recipe.depth,
        model=replace(
            shape,
            width=shape.width or rung.width,
            head_dim=shape.head_dim or rung.head_dim,
            context=shape.context or rung.context,
        ),
        text=replace(text, vocab_size=text.vocab_size or rung.vocab_size),
        train=replace(
            train,
            steps=_steps(rung, train.batch_tokens),
            batch_tokens=train.batch_tokens or rung.batch_tokens,
        ),
    )


def _steps(rung: Rung, batch_tokens: int | None) -> int:
    """The steps that read the rung's tokens, also where the idea has a batch of its own."""
    return max(1, round(rung.steps * rung.batch_tokens / (batch_tokens or rung.batch_tokens)))


def numbers(recipe: Recipe) -> str:
    """Returns the fingerprint (16 hex digits) of a resolved recipe's numbers: what it learns follows from them.

    Verdicts on a baseline with other numbers are on an old baseline.
    """
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
    assert train.steps and train.batch_tokens
    return {0: Rung(train.steps, train.batch_tokens), 1: Rung(-(-train.steps * 3 // 2), train.batch_tokens)}
