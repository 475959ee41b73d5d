"""Numbers are cut into tokens of up to three digits.

Hypothesis: two digits per token are best: one makes texts longer, three waste tokens on rare combinations.
Source: nanochat's experiment log, 2026-01-13: 0.972 bits per byte rather than 0.965 (depth 12, vocabulary 32,768).
Expected effect: worse; the tokenizer differs, so compare bits per byte only.
Verdict: undecided on rung 0 (-0.0007 bits per byte, 8 pairs); multiplier × 1.006 [0.966, 1.046]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0002 bits per byte, 8 pairs); multiplier × 0.999 [0.981, 1.016]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import TextRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="digits_3", text=TextRecipe(digits=3))
