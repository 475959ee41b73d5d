"""Ablation: all rates fall with the square root of the batch, not with the cube root.

Hypothesis: the square root was fitted to batches of 2^18 tokens and more. At some thousand tokens it leaves rates that
are too low.
Source: nanochat's scaling rules, at every batch.
Expected effect: worse, the smaller the batch.
Verdict: worse on rung 0 (+0.0347 bits per byte, 3 pairs); multiplier × 0.748 [0.717, 0.780]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0306 bits per byte, 3 pairs); multiplier × 0.842 [0.820, 0.862]. Study ladder.

In 100 steps of 2,048 tokens at width 64, the cube root comes to 2.526 ± 0.010 bits per byte and the square root to
2.575 ± 0.004, seven seeds each. So the cube root is better and noisier.

Single runs of one seed, earlier: 14.6 MB of English, 4,096 tokens a step, nine minutes on one core, before the decay of
the tables followed the horizon. Four layers of 128: 1.551 with the square root, 1.536 at twice its rates, 1.539 at 3.2
times; the cube root is 2.2 times. Four layers of 256: 1.610, and 1.580 at twice the rates.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="rates_square_root", optim=OptimRecipe(batch_exponent=0.5))
