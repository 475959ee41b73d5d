"""Batches of 32,768 tokens, eight times those of small runs, at equal tokens.

Hypothesis: above the critical batch, a larger one wastes tokens.
Source: McCandlish et al. 2018 (arXiv 1812.06162): the critical batch of a short run is far smaller.
Expected effect: worse.
Verdict: worse on rung 0 (+0.2131 bits per byte, 5 pairs); multiplier × 0.185 [0.102, 0.346]. Study ladder-2. Before:
old baseline: undecided on rung 0 (+0.2125 bits per byte, 3 pairs); multiplier × 0.203 [0.105, 0.447]. Study ladder-
offset. Before: old baseline: worse on rung 0 (+0.1344 bits per byte, 5 pairs); multiplier × 0.497 [0.413, 0.603]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="large_batch", train=TrainRecipe(batch_tokens=32_768))
