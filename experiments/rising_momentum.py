"""Muon's momentum rises from 0.85 to 0.97 over 400 steps and falls to 0.90 in the warm-down; the default is 0.95.

Hypothesis: a momentum that rises early and falls late tracks the noise of the gradient.
Source: nanochat, whose experiment log (2026-01-19) swept its start and end. It was quern's default until a constant
0.95 (Jordan et al. 2024) was better by 0.009 on rung 0 and by 0.007 on rung 1 in five pairs each, study ladder-offset.
Expected effect: worse.
Verdict: worse on rung 0 (+0.0092 bits per byte, 5 pairs); undecided on rung 1 (+0.0021 bits per byte, 3 pairs);
multiplier × 0.980 [0.948, 1.015], grows. Study ladder-2.
"""

from collections.abc import Callable
from dataclasses import replace

from quern.optim.schedule import Multipliers, learning_rate, warmup_stable_decay
from quern.recipe import ResolvedTrain
from quern.recipes.gpt import RECIPE as BASELINE


def schedule(train: ResolvedTrain) -> Callable[[float], Multipliers]:
    told, steps = warmup_stable_decay(train), train.steps

    def rising(step: float) -> Multipliers:
        up = 0.85 + 0.12 * min(1.0, step / 400)
        falls = learning_rate(step, steps, warmup_steps=0, warmdown_share=train.warmdown_share, final=0.0)
        return told(step)._replace(momentum=min(up, 0.90 + 0.07 * falls))

    return rising


RECIPE = replace(BASELINE, name="rising_momentum", make_schedule=schedule)
