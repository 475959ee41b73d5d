"""Gradients are clipped to a global norm of 1.

Hypothesis: clipping guards against rare large gradients.
Source: nanochat's experiment log, 2026-01-08: bounds of 0.25 to 2 changed nothing, since the norm stays below 1, and
cost 2% of the time. Muon ignores the scale of its gradients anyway.
Expected effect: no difference at equal steps, slightly slower.
Verdict: undecided on rung 0 (+0.0021 bits per byte, 8 pairs); multiplier × 0.982 [0.954, 1.011]. Study ladder-2.
Before: old baseline: better, small on rung 0 (-0.0027 bits per byte, 8 pairs); multiplier × 1.015 [1.006, 1.024]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="clip_norm", train=TrainRecipe(clip_norm=1.0))
