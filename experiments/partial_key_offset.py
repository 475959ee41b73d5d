"""In long layers, the channels of keys without a position are those of the token before.

Hypothesis: a query that matches a token's predecessor reads the token in one layer: one-layer induction.
Source: modded-nanogpt's pull request 169: 50 steps fewer of 2,000. As there, half of the pairs do not rotate in any
layer, and the keys are shifted after norm and rotation. It has other rates, and longer windows in its long layers.
Expected effect: better at equal steps.
Verdict: better on rung 0 (-0.1300 bits per byte, 3 pairs); better on rung 1 (-0.0752 bits per byte, 5 pairs); better on
rung 2 (-0.0081 bits per byte, 5 pairs); multiplier × 1.060 [1.040, 1.081], fades. Study ladder.
"""

from dataclasses import replace

from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="partial_key_offset", model=replace(BASELINE.model, key_offset=True))
