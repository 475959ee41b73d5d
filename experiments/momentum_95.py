"""Muon's momentum is 0.95 throughout.

Hypothesis: a momentum that rises early and falls late tracks the noise of the gradient.
Source: Jordan et al. 2024 (modded-nanogpt's walkthrough). nanochat's experiment log, 2026-01-19, swept its start and
end; the default goes from 0.85 to 0.97 and down to 0.90.
Expected effect: slightly worse in the end.
Verdict: better on rung 0 (-0.0053 bits per byte, 5 pairs); undecided on rung 1 (-0.0313 bits per byte, 1 pair);
undecided on rung 2 (-0.0001 bits per byte, 3 pairs); multiplier × 1.001 [0.976, 1.024], fades. Study ladder.
"""

from collections.abc import Callable
from dataclasses import replace

from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.recipe import ResolvedTrain
from quern.recipes.gpt import RECIPE as BASELINE


def schedule(train: ResolvedTrain) -> Callable[[int], Multipliers]:
    told = warmup_stable_decay(train)
    return lambda step: told(step)._replace(momentum=0.95)


RECIPE = replace(BASELINE, name="momentum_95", make_schedule=schedule)
