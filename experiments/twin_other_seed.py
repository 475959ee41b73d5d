"""The baseline from other initial values.

Hypothesis: initial values make noise and no difference.
Source: a known answer, to test a rung of the ladder with.
Expected effect: no difference.
Verdict: no difference on rung 0 (-0.0002 bits per byte, 8 pairs); no difference on rung 1 (-0.0005 bits per byte, 7
pairs); multiplier × 1.005 [0.988, 1.022], unclear. Study ladder-2. Before: old baseline: undecided on rung 0 (+0.0007
bits per byte, 3 pairs); multiplier × 0.994 [0.938, 1.052]. Study ladder-offset. Before: old baseline: no difference on
rung 0 (+0.0000 bits per byte, 8 pairs); multiplier × 1.000 [0.989, 1.011]. Study ladder.
"""

from dataclasses import replace

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE

OTHER = 1_000_003
OWN_INITIAL_VALUES = ("*",)


class OtherSeedGPT(GPT):
    def initialize(self, seed: int) -> None:
        super().initialize(seed + OTHER)


RECIPE = replace(BASELINE, name="twin_other_seed", make_model=OtherSeedGPT)
