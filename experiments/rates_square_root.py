"""Ablation: all rates fall with the square root of the batch, not with the cube root.

Hypothesis: the square root was fitted to batches of 2^18 tokens and more. At some thousand tokens it leaves rates that
are too low.
Source: nanochat's scaling rules, at every batch; the default of quern until the study `small` here.
Expected effect: worse, the smaller the batch.
Verdict: not yet measured.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="rates_square_root", optim=OptimRecipe(batch_exponent=0.5))
