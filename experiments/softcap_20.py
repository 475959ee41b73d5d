"""Logits are capped at 20 rather than at 15.

Hypothesis: a looser cap lets the model be more confident.
Source: nanochat's experiment log, 2026-03-02: of the caps from 5 to 30, 20 was the best at depth 24, by 0.001 bits
per byte.
Expected effect: 0.001 bits per byte better, or no difference.
Verdict: no difference at equal steps (-0.0016 bits per byte, 7 pairs); no difference at equal flops (-0.0016 bits per
byte, 7 pairs); no difference at equal seconds (-0.0016 bits per byte, 7 pairs). Study stream.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="softcap_20", model=ModelRecipe(softcap=20.0))
