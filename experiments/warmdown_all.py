"""The rate falls linearly over the whole run.

Hypothesis: a linear decay to zero without a plateau is the best schedule of a fixed length.
Source: Defazio et al. 2023 (arXiv 2310.07831), Bergsma et al. 2025 (arXiv 2502.15938).
Expected effect: no difference to 65%, or slightly better.
Verdict: worse on rung 0 (+0.0281 bits per byte, 3 pairs); multiplier × 0.790 [0.760, 0.821]. Study ladder-2. Before:
old baseline: undecided on rung 0 (+0.0224 bits per byte, 2 pairs). Study ladder-offset. Before: old baseline: worse on
rung 0 (+0.0194 bits per byte, 3 pairs); multiplier × 0.896 [0.879, 0.914]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="warmdown_all", train=TrainRecipe(warmdown_share=1.0, final_lr=0.0))
