"""Muon's weight decay falls linearly, not along half a cosine.

Hypothesis: the form of the fall does not matter.
Source: nanochat's experiment log, 2026-01-10, has the line; nanochat's later default is the half cosine.
Expected effect: no difference.
Verdict: no difference on rung 0 (+0.0019 bits per byte, 8 pairs); multiplier × 0.984 [0.966, 1.003]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0003 bits per byte, 5 pairs); multiplier × 0.998 [0.989, 1.009]. Study
ladder.
"""

from collections.abc import Callable
from dataclasses import replace

from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.recipe import ResolvedTrain
from quern.recipes.gpt import RECIPE as BASELINE


def schedule(train: ResolvedTrain) -> Callable[[int], Multipliers]:
    told, steps = warmup_stable_decay(train), train.steps
    return lambda step: told(step)._replace(decay=1 - min(1.0, step / steps))


RECIPE = replace(BASELINE, name="linear_decay", make_schedule=schedule)
