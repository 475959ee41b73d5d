"""Ablation: 64 channels per layer also in small models: four layers of 256, not of 128.

Hypothesis: at depth 4 the head has most of the products, and its cost grows with the width. So a narrower model is
better for the same time.
Source: the default of nanochat at every depth, and of quern until the study `isoflop` here, by which models a fifth as
large are better for ten minutes on a CPU.
Expected effect: worse at equal FLOPs and at equal time; a step costs more, so do not compare at equal steps.
Verdict: better at equal steps (-0.0796 bits per byte, 6 pairs); worse at equal flops (+0.2576 bits per byte, 6 pairs);
worse at equal seconds (+0.2538 bits per byte, 6 pairs). Study sizes.

With the FLOPs of 100 steps of the baseline, the study gives this model 31 steps, so its difference is that of a very
short run. Single runs of one seed, before it: 14.6 MB of English, 4,096 tokens a step, nine minutes on one core, at
rates by the square root of the batch. Four layers of 256: 1.610 bits per byte; 3 of 192: 1.567; 2 of 128: 1.573; 4 of
128: 1.551.

For another depth below 8, set --model.width to 64 times the depth.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="aspect_64", model=ModelRecipe(width=256))
