"""Ablation: every layer sees the whole context.

Hypothesis: short windows save time and cost little quality.
Source: nanochat's experiment log, 2026-01-11: SSSL is a good balance between compute and quality.
Expected effect: slightly better at equal steps, worse at equal time.
Verdict: no difference at equal steps (+0.0003 bits per byte, 8 pairs); worse at equal flops (+0.0426 bits per byte, 7
pairs); no difference at equal seconds (+0.0003 bits per byte, 8 pairs). Study attention.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="all_long_windows", model=ModelRecipe(windows="L"))
