"""The second moment of Muon's variance reduction remembers longer: 0.95.

Hypothesis: a longer mean is less noisy.
Source: nanochat's experiment log, 2026-01-10, which introduced it with 0.95; nanochat's later default is 0.9.
Expected effect: no difference.
Verdict: no difference on rung 0 (-0.0002 bits per byte, 8 pairs); multiplier × 1.001 [0.983, 1.022]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0004 bits per byte, 5 pairs); multiplier × 0.998 [0.988, 1.010]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="muon_beta2_95", optim=OptimRecipe(muon_beta2=0.95))
