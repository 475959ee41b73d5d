"""Route A of the sweep: higher rates of embedding and matrices, more decay.

Hypothesis: rates tuned at depth 12 help there.
Source: nanochat's experiment log, 2026-01-19: embedding 0.3 to 0.4, matrices 0.02 to 0.025, decay times 1.5; 0.002
better at depth 12, worse at depth 20. The factor of the decay is applied to our own default.
Expected effect: better at small depth, worse at large depth.
Verdict: worse, small on rung 0 (+0.0049 bits per byte, 8 pairs); multiplier × 0.959 [0.931, 0.986]. Study ladder-2.
Before: old baseline: worse, small on rung 0 (+0.0043 bits per byte, 5 pairs); multiplier × 0.976 [0.962, 0.990]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="route_a", optim=OptimRecipe(embedding_lr=0.4, matrix_lr=0.025, matrix_decay=0.42))
