"""The head learns at twice the rate.

Hypothesis: 0.008 is too low for short runs of small models, and 0.032 may be too high for longer ones.
Source: the studies `rates` and `head` here.
Expected effect: better in short runs, and less worse than 0.032 in long ones.
Verdict: not yet measured.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="head_rate_016", optim=OptimRecipe(head_lr=0.016))
