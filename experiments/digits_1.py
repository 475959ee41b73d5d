"""Numbers are cut into tokens of one digit.

Hypothesis: two digits per token are best: one makes texts longer, three waste tokens on rare combinations.
Source: nanochat's experiment log, 2026-01-13: 0.969 bits per byte rather than 0.965 (depth 12, vocabulary 32,768).
Expected effect: worse; the tokenizer differs, so compare bits per byte only.
Verdict: undecided on rung 0 (+0.0054 bits per byte, 8 pairs); multiplier × 0.955 [0.919, 0.998]. Study ladder-2.
Before: old baseline: undecided on rung 0 (+0.0018 bits per byte, 8 pairs); multiplier × 0.990 [0.962, 1.021]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import TextRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="digits_1", text=TextRecipe(digits=1))
