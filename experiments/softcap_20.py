"""Logits are capped at 20 rather than at 15.

Hypothesis: a looser cap lets the model be more confident.
Source: nanochat's experiment log, 2026-03-02: of the caps from 5 to 30, 20 was the best at depth 24, by 0.001 bits
per byte.
Expected effect: 0.001 bits per byte better, or no difference.
Verdict: no difference on rung 0 (-0.0018 bits per byte, 8 pairs); multiplier × 1.015 [0.996, 1.036]. Study ladder-2.
Before: old baseline: no difference on rung 0 (-0.0000 bits per byte, 5 pairs); multiplier × 1.000 [0.989, 1.012]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="softcap_20", model=ModelRecipe(softcap=20.0))
