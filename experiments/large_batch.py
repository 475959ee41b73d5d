"""Batches of 32,768 tokens, eight times those of small runs, at equal tokens.

Hypothesis: above the critical batch, a larger one wastes tokens.
Source: McCandlish et al. 2018 (arXiv 1812.06162): the critical batch of a short run is far smaller.
Expected effect: worse.
Verdict: worse on rung 0 (+0.1866 bits per byte, 8 pairs); worse on rung 1 (+0.1645 bits per byte, 5 pairs); multiplier
× 0.250 [0.130, 0.484], unclear. Study ladder-2. Before: old baseline: undecided on rung 0 (+0.2121 bits per byte, 3
pairs); multiplier × 0.204 [0.005, 120.109]. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.1336 bits
per byte, 5 pairs); multiplier × 0.500 [0.381, 0.697]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="large_batch", train=TrainRecipe(batch_tokens=32_768))
