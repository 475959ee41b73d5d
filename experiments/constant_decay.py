"""Ablation: Muon's weight decay does not fall during the run.

Hypothesis: decay at the end of the run pulls weights from where they have settled.
Source: nanochat's experiment log, 2026-01-10: a decay that falls linearly to zero worked better than a constant one.
Expected effect: worse at the end.
Verdict: worse on rung 0 (+0.0216 bits per byte, 3 pairs); multiplier × 0.834 [0.802, 0.866]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0137 bits per byte, 3 pairs); multiplier × 0.925 [0.909, 0.941]. Study ladder.
"""

from collections.abc import Callable
from dataclasses import replace

from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.recipe import ResolvedTrain
from quern.recipes.gpt import RECIPE as BASELINE


def schedule(train: ResolvedTrain) -> Callable[[int], Multipliers]:
    told = warmup_stable_decay(train)
    return lambda step: told(step)._replace(decay=1.0)


RECIPE = replace(BASELINE, name="constant_decay", make_schedule=schedule)
