"""Ablation: the rate does not fall at the end of the run.

Hypothesis: the warm-down averages out the noise of the last steps.
Source: Hägele et al. 2024 (arXiv 2405.18392): a cooldown from a constant rate lowers the loss.
Expected effect: worse.
Verdict: worse on rung 0 (+0.0364 bits per byte, 3 pairs); worse on rung 1 (+0.0604 bits per byte, 3 pairs); multiplier
× 0.576 [0.558, 0.595], fades. Study ladder-2. Before: old baseline: worse on rung 0 (+0.0370 bits per byte, 3 pairs);
multiplier × 0.744 [0.701, 0.786]. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.0394 bits per byte, 3
pairs); multiplier × 0.801 [0.760, 0.842]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="no_warmdown", train=TrainRecipe(warmdown_share=0.0))
