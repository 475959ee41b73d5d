"""The product of the head is computed in FP8.

Hypothesis: the head is the largest product of small models, so FP8 saves time.
Source: nanochat's experiment log, 2026-01-13: 1% faster, 2 GB more memory; static scales 10/448, 0.1/448 and a
gradient scale of 1/57344.
Expected effect: slightly faster on a GPU with FP8, the same loss. On a CPU the format is emulated, which is slow.
Verdict: no difference on rung 0 (+0.0019 bits per byte, 8 pairs); multiplier × 0.984 [0.968, 1.001]. Study ladder-2.
Before: old baseline: worse, small on rung 0 (+0.0021 bits per byte, 8 pairs); multiplier × 0.988 [0.981, 0.997]. Study
ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="fp8_head", train=TrainRecipe(fp8="head"))
