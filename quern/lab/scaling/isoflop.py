"""The plan of an IsoFLOP study: which sizes are trained for how many steps, so that every run costs its budget.

A size is a depth, whose width follows from the dial, or DEPTHxWIDTH. Parameters and FLOPs are counted on the model
itself (model/count.py). All sizes share one vocabulary and one context: both change the loss by themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from quern.lab.scaling.fits import FEWEST_BUDGETS, Envelope
from quern.model.count import FlopCounter, flop_counter, parameters
from quern.recipe import Recipe
from quern.resolve import batch_rule, resolve
from quern.terminal import counted

TOLERANCE = 0.01  # largest share by which the FLOPs of a run differ from its budget
Key = tuple[float, str, int]  # budget, size and seed of a cell


class Convention(NamedTuple):
    """A way to count parameters. field: its name in `model.count.Parameters`."""

    field: str
    meaning: str


CONVENTIONS = {
    "kaplan": Convention("kaplan", "matrices and head, no embeddings (arXiv 2001.08361)"),
    "chinchilla": Convention("total", "all parameters (arXiv 2203.15556)"),
    "transformer": Convention("transformer", "matrices inside the blocks, no head"),
}
"""The first counts what multiplies every token, so C ≈ 6 N D holds for it. nanochat compares the same three."""


@dataclass(frozen=True)
class Cell:
    """One planned run. size: as given by the user; seed: draws the initial weights and the data order; flops: FLOPs of
    the model alone, since the update's share falls as batches grow; parameters: by convention."""

    budget: float
    size: str
    seed: int
    depth: int
    width: int
    steps: int
    batch_tokens: int
    flops: float
    parameters: dict[str, int]

    @property
    def key(self) -> Key:
        return self.budget, self.size, self.seed

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_tokens

    @property
    def name(self) -> str:
        return f"{self.budget:.3g} FLOPs, size {self.size}, seed {self.seed}"

    def recipe(self, recipe: Recipe) -> Recipe:
        """The study's recipe with this cell's size and length."""
        train = replace(recipe.train, steps=self.steps, batch_tokens=self.batch_tokens)
        return replace(_sized(recipe, self.size), train=train)


@dataclass(frozen=True)
class Plan:
    """The runs of a study, by size, so that a model is compiled once. refused: cells that cannot be trained, with the
    reasons."""

    cells: tuple[Cell, ...]
    refused: tuple[str, ...] = ()


def make_plan(recipe: Recipe, budgets: Sequence[float], sizes: Sequence[str], seeds: Sequence[int] = (0,)) -> Plan:
    """Plans a study."""
    shapes = {size: resolve(_sized(recipe, size)) for size in dict.fromkeys(sizes)}
    for flag, field in (("--text.vocab-size", "vocab_size"), ("--model.context", "context")):
        values = {size: getattr(one.model, field) for size, one in shapes.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value:,} at {size}" for size, value in values.items())
            raise ValueError(f"the sizes differ in {flag[2:]} ({listed}): set {flag} for all of them")
    cells, refused = [], []
    for size, resolved in shapes.items():
        model, counter, counts = resolved.model, flop_counter(resolved), parameters(resolved)
        for budget in sorted(set(budgets)):
            try:
                steps, batch_tokens = _length(recipe.train.batch_tokens, budget, counter, model.context)
                flops = steps * counter.step(batch_tokens).model
                by_convention = {name: getattr(counts, one.field) for name, one in CONVENTIONS.items()}
                one = Cell(budget, size, 0, model.depth, model.width, steps, batch_tokens, flops, by_convention)
                resolve(one.recipe(recipe))
            except ValueError as error:
                refused.append(f"{budget:.3g} FLOPs, size {size}: {error}")
                continue
            cells += [replace(one, seed=seed) for seed in seeds]
    return Plan(tuple(cells), tuple(refused))


def _sized(recipe: Recipe, size: str) -> Recipe:
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", size)
    if found is None:
        raise ValueError(f"'{size}' is no size: give a depth such as 4, or DEPTHxWIDTH such as 4x320")
    depth, width = int(found[1]), found[2]
    shape = recipe.model if width is None else replace(recipe.model, width=int(width))
    return replace(recipe, depth=depth, model=shape)


def _length(fixed_batch: int | None, budget: float, counter: FlopCounter, context: int) -> tuple[int, int]:
    """The steps, and the tokens of each, that cost the budget."""
    batch = fixed_batch or batch_rule(budget / counter.per_token(), context)
    while True:
        each = counter.step(batch).model
        steps = max(1, round(budget / each))
        error = steps * each / budget - 1
        if abs(error) <= TOLERANCE:
            return steps, batch
        if fixed_batch or batch <= context:
            raise ValueError(
                f"{counted(steps, 'step')} of {batch:,} tokens miss the budget by {100 * abs(error):,.1f} %: give a "
                f"larger budget{', a smaller --train.batch-tokens' if fixed_batch else ''} or a smaller size"
            )
        batch = max(context, batch // 2 // context * context)


@dataclass(frozen=True)
class Stability:
    """Spread of the tokens per parameter over the budgets, by convention, or a refusal. name: the convention with the
    least spread; spreads: SD of ln (tokens per parameter); support: share of the bootstrap with the least spread."""

    name: str | None = None
    spreads: Mapping[str, float] | None = None
    support: Mapping[str, float] | None = None
    refusal: str = ""


def most_stable(envelopes: Mapping[str, Envelope]) -> Stability:
    """Compares the conventions over the budgets that have an optimum in all of them."""
    common = set.intersection(*({one.flops for one in found.accepted} for found in envelopes.values()))
    if len(common) < FEWEST_BUDGETS:
        reason = f"{len(common)} of at least {FEWEST_BUDGETS} budgets have an optimum in every convention"
        return Stability(refusal=reason)
    spreads, drawn = {}, []
    for name, found in envelopes.items():
        shared = [at for at, one in enumerate(found.accepted) if one.flops in common]
        ratios = [math.log(one.ratio.value) for one in found.accepted if one.flops in common and one.ratio]
        spreads[name] = float(np.std(ratios, ddof=1))
        drawn.append(np.std(found.samples[:, shared, 1] - found.samples[:, shared, 0], axis=1, ddof=1))
    draws = np.stack(drawn)
    winners = np.argmin(draws[:, np.isfinite(draws).all(0)], axis=0)
    support = {name: float(np.mean(winners == at)) for at, name in enumerate(spreads)}
    return Stability(min(spreads, key=lambda name: spreads[name]), spreads, support)
