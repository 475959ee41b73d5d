"""The head learns at four times the rate.

Hypothesis: 0.008 is too low for short runs of small models: the head is half of such a model, and starts at zero.
Source: the study `rates` here, 100 trials over 34 constants: the head's rate decides most, and its best value is at the
upper edge of 0.002 to 0.032.
Expected effect: better in short runs.
Verdict: worse on rung 0 (+0.0139 bits per byte, 3 pairs); multiplier × 0.890 [0.851, 0.929]. Study ladder-2. Before:
old baseline: undecided on rung 0 (+0.0042 bits per byte, 3 pairs); undecided on rung 1 (+0.0174 bits per byte, 3
pairs); multiplier × 0.858 [0.800, 0.915], fades. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.0120
bits per byte, 3 pairs); multiplier × 0.934 [0.916, 0.954]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="head_rate_032", optim=OptimRecipe(head_lr=0.032))
