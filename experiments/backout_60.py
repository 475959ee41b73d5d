"""Backout reads the stream after 60% of the layers, not after half of them.

Hypothesis: a later tap subtracts more of what the head does not need.
Source: nanochat's experiment log, 2026-01-16, and modded-nanogpt, whose tap is there. At small depths the tap is at
least one layer later than the default's.
Expected effect: no difference.
Verdict: undecided on rung 0 (+0.0024 bits per byte, 8 pairs); multiplier × 0.980 [0.961, 0.999]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0016 bits per byte, 5 pairs); multiplier × 0.991 [0.980, 1.003]. Study
ladder.

It needs at least two layers.
"""

from dataclasses import replace

from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class LaterBackoutGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        depth = len(self.blocks)
        self.backout_layer = min(max(depth // 2, round(0.6 * depth) - 1), depth - 2)
        self.kept_layers = {self.backout_layer}


RECIPE = replace(BASELINE, name="backout_60", make_model=LaterBackoutGPT)
