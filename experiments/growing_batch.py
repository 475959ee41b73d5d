"""A batch that grows 1 → 2 → 3 during training, at equal tokens; the rates follow it.

Hypothesis: small batches are enough early, so a growing batch takes more steps of them.
Source: modded-nanogpt's batch schedule; Smith et al. 2018 (arXiv 1711.00489). nanochat's experiment log, 2026-01-17
(8 → 16 → 24 with scaled rates) and 2026-02-05 (a ramp): small gains, given up for their complexity. The log does not
say how the rates scale; here they are those that the baseline has at a batch of that size.
Expected effect: lower loss at equal tokens.
Changed: 2026-11-25T20:00, the rates follow the batch.
Verdict: no difference on rung 0 (-0.0008 bits per byte, 8 pairs); multiplier × 1.006 [0.981, 1.033]. Study ladder-2.
Before: old baseline: worse on rung 0 (+0.0081 bits per byte, 3 pairs); multiplier × 0.954 [0.939, 0.970]. Study ladder.

Shows the seams `make_batches` (a batch stays a pure function of (seed, step)) and `make_schedule`.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quern.data.batch import Batch, Batches
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.recipe import Resolved, ResolvedTrain
from quern.recipes.gpt import RECIPE as BASELINE


def stages_begun(step: int, steps: int) -> list[int]:
    """For each of the two growths, the number of steps since then."""
    return [max(0, step - bound) for bound in (steps // 3, 2 * steps // 3)]


class GrowingBatches(Batches):
    """Step s reads 1, 2 or 3 consecutive batches of half the recipe's size, so a run reads as many tokens as before."""

    def __init__(self, unit: Loader, steps: int) -> None:
        self.unit, self.steps, self.context = unit, steps, unit.context
        self.batch_rows = 2 * unit.batch_rows

    def first(self, step: int) -> int:
        """The number of the first small batch that a step reads."""
        return step + sum(stages_begun(step, self.steps))

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        units = range(self.first(step), self.first(step + 1))
        parts = [self.unit.batch(number, rank, ranks) for number in units]
        names = ("tokens", "targets", "mask")
        return Batch(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def report(self) -> dict[str, float]:
        return self.unit.report()


def make_batches(recipe: Resolved, corpus: Corpus) -> Batches:
    context, tokens, steps, seed = recipe.model.context, recipe.train.batch_tokens, recipe.train.steps, recipe.data_seed
    if tokens // context % 2:
        raise ValueError(f"this idea halves the batch: give --train.batch-tokens an even number of rows of {context}")
    return GrowingBatches(Loader(corpus, context, tokens // context // 2, seed), steps)


def schedule(train: ResolvedTrain) -> Callable[[int], Multipliers]:
    """The baseline's schedule, with rates that scale with the batch of the step as the recipe's scale with its own."""
    baseline, steps, exponent = warmup_stable_decay(train), train.steps, 1 / 3  # the baseline's, below depth 8

    def told(step: int) -> Multipliers:
        factor = ((1 + sum(since > 0 for since in stages_begun(step + 1, steps))) / 2) ** exponent
        found = baseline(step)
        return found._replace(lr=found.lr * factor, groups={"head": factor**-0.5})  # the head's follow the root

    return told


RECIPE = replace(
    BASELINE,
    name="growing_batch",
    make_batches=make_batches,
    make_schedule=schedule,
    unused=(*BASELINE.unused, "train.packing"),
)
