"""Gradients are summed in fp32 over micro-batches, steps and ranks.

Hypothesis: sums in bf16 lose small gradients.
Source: Common practice (Megatron-LM); nanochat and modded-nanogpt sum in the dtype of the parameters.
Expected effect: no difference with few micro-batches.
Verdict: no difference on rung 0 (+0.0000 bits per byte, 3 pairs); no difference on rung 1 (+0.0000 bits per byte, 3
pairs); multiplier × 1.000 [1.000, 1.000], holds. Study ladder-2. Before: old baseline: no difference on rung 0 (+0.0000
bits per byte, 3 pairs); multiplier × 1.000 [1.000, 1.000]. Study ladder-offset. Before: old baseline: no difference on
rung 0 (+0.0000 bits per byte, 3 pairs); multiplier × 1.000 [1.000, 1.000]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="fp32_gradients", train=TrainRecipe(grad_dtype="fp32"))
