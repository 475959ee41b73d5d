"""Heads of 128 channels also in small models.

Hypothesis: fewer, wider heads are better at every size.
Source: nanochat's experiment log, 2026-01-17: the model prefers heads of 128. Our default below a width of 512 is
64.
Expected effect: better at widths of 256 to 448, if the finding holds there; from depth 8 on it is the default.
Verdict: better on rung 0 (-0.0230 bits per byte, 3 pairs); better on rung 1 (-0.0114 bits per byte, 3 pairs);
multiplier × 1.110 [1.081, 1.143], unclear. Study ladder-2. Before: old baseline: undecided on rung 0 (+0.0023 bits per
byte, 8 pairs); multiplier × 0.916 [0.892, 0.941]. Study ladder.

The study's models have 128 channels ([narrow](narrow.py)): one head of 128 against two of 64.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="head_dim_128", model=ModelRecipe(head_dim=128))
