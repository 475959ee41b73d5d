"""Wider and shallower: 128 channels per layer rather than 64.

Hypothesis: models prefer to be thinner and longer, so this is worse at equal FLOPs.
Source: nanochat's experiment log, 2026-01-17: at 1e18 FLOPs, 64 channels per layer beat 128. Here 3 layers of 384
stand against the baseline's 4 of 256.
Expected effect: worse at equal FLOPs; a step costs more, so do not compare at equal steps.
Verdict: not yet measured.

The study's baseline has 4 layers of 128 ([narrow](narrow.py)). For another depth set --model.width to 128 · depth.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="aspect_128", depth=3, model=ModelRecipe(width=384))
