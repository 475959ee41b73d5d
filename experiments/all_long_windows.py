"""Ablation: every layer sees the whole context.

Hypothesis: short windows save time and cost little quality.
Source: nanochat's experiment log, 2026-01-11: SSSL is a good balance between compute and quality.
Expected effect: slightly better at equal steps, worse at equal time.
Verdict: worse on rung 0 (+0.0127 bits per byte, 5 pairs); multiplier × 0.860 [0.822, 0.900]. Study ladder-2. Before:
old baseline: worse, small on rung 0 (+0.0044 bits per byte, 5 pairs); multiplier × 0.934 [0.923, 0.945]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="all_long_windows", model=ModelRecipe(windows="L"))
