"""Heads of 128 channels also in small models.

Hypothesis: fewer, wider heads are better at every size.
Source: nanochat's experiment log, 2026-01-17: the model prefers heads of 128. Our default below a width of 512 is
64.
Expected effect: better at widths of 256 to 448, if the finding holds there; from depth 8 on it is the default.
Verdict: better on rung 0 (-0.0231 bits per byte, 3 pairs); better on rung 1 (-0.0118 bits per byte, 3 pairs); undecided
on rung 2 (+0.0037 bits per byte, 3 pairs); multiplier × 1.090 [1.037, 1.138], unclear. Study ladder-2. Before: old
baseline: undecided on rung 0 (+0.0023 bits per byte, 8 pairs); multiplier × 0.916 [0.892, 0.941]. Study ladder.

The rungs' own heads have 32 channels, so a rung compares 128 with 32. The default of a small model is 64, and against
it the quickstart's model (depth 4, two heads for four) was trained five times each, with paired seeds. A step takes
0.93 of the time. After 500 steps the bits per byte are the same (0.273 and 0.274). With as many steps as the time
allows, 535, they are lower by 0.004 (0.000 to 0.009), and the answers are not better: small talk is right in 0.831
for 0.863 (five of five seeds are no better), counting 0.923 for 0.925, choice 0.896 for 0.896, spelling 0.938 for
0.946. So a small model keeps heads of 64.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="head_dim_128", model=ModelRecipe(head_dim=128))
