"""All large products are computed in FP8.

Hypothesis: FP8 doubles the speed of products; the loss of precision costs less.
Source: nanochat's experiment log, 2026-02-02: with one scale per tensor 17% faster at depth 26, of which about 5%
are left at equal loss; slower at depth 12.
Expected effect: worse at equal steps; better at equal time for large models only. On a CPU the format is emulated.
Verdict: worse, small on rung 0 (+0.0034 bits per byte, 8 pairs); multiplier × 0.972 [0.953, 0.992]. Study ladder-2.
Before: old baseline: undecided on rung 0 (+0.0026 bits per byte, 3 pairs); multiplier × 0.985 [0.970, 1.000]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="fp8_all", train=TrainRecipe(fp8="all"))
