"""Ablation: Muon has no weight decay.

Hypothesis: decay keeps the matrices small, so that the rate stays effective.
Source: nanochat's experiment log, 2026-01-10: solid improvements from decay.
Expected effect: worse at the end of long runs, no difference in short ones.
Verdict: worse on rung 0 (+0.0606 bits per byte, 3 pairs); multiplier × 0.604 [0.581, 0.629]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0252 bits per byte, 3 pairs); multiplier × 0.868 [0.843, 0.893]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="no_decay", optim=OptimRecipe(matrix_decay=0.0))
