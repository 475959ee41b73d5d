"""Heads of 64 channels rather than 128.

Hypothesis: fewer, wider heads are better.
Source: nanochat's experiment log, 2026-01-17: the model prefers heads of 128.
Expected effect: worse from depth 8 on; below a width of 512 it is the default, except on rungs 0 to 2, whose heads
have 32 channels.
Verdict: better on rung 0 (-0.0117 bits per byte, 3 pairs); better on rung 1 (-0.0126 bits per byte, 3 pairs);
multiplier × 1.125 [1.082, 1.173], fades. Study ladder-2. Before: old baseline: worse on rung 0 (+0.0053 bits per byte,
8 pairs); multiplier × 1.059 [1.034, 1.085]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="head_dim_64", model=ModelRecipe(head_dim=64))
