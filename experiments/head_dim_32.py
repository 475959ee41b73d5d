"""Heads of 32 channels in small models rather than 64.

Hypothesis: a model of 256 channels has only four heads of 64 in a layer. Eight heads of 32 can look at eight places.
Source: an own thought. nanochat's experiment log, 2026-01-17, prefers wide heads, in models of 8 heads and more.
Expected effect: no difference in bits per byte; tasks that need several heads at once are learned sooner.
Verdict: no difference on rung 0 (+0.0000 bits per byte, 3 pairs); multiplier × 1.000 [1.000, 1.000]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0000 bits per byte, 3 pairs); multiplier × 1.000 [1.000, 1.000]. Study
ladder.

Rungs 0 to 2 have heads of 32 themselves, so there it is the baseline, and its verdict says nothing.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="head_dim_32", model=ModelRecipe(head_dim=32))
