"""Route B of the sweep: a lower rate of the x0 scalars.

Hypothesis: x0 scalars need a slower, smoother update.
Source: nanochat's experiment log, 2026-01-19: rate 0.5 to 0.2 with beta1 of 0.9 or more; 0.002 better at depth 12,
0.0007 at depth 20. A beta1 of 0.96 is the default already.
Expected effect: no difference.
Verdict: no difference on rung 0 (+0.0003 bits per byte, 8 pairs); multiplier × 0.998 [0.975, 1.021]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0002 bits per byte, 5 pairs); multiplier × 0.999 [0.984, 1.013]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="route_b", optim=OptimRecipe(x0_lr=0.2))
