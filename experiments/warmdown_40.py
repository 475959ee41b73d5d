"""The rate falls over the last 40% of the run, not over 65%.

Hypothesis: a longer warm-down is better for a run of fixed length.
Source: modded-nanogpt's walkthrough (0.4 to 0.45), and nanochat's first default; nanochat's later default is 0.65.
Expected effect: slightly worse.
Verdict: better, small on rung 0 (-0.0037 bits per byte, 5 pairs); multiplier × 1.021 [1.013, 1.031]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="warmdown_40", train=TrainRecipe(warmdown_share=0.4))
