"""The rate falls over the last 65% of the run, not over 40%.

Hypothesis: a longer warm-down is better for a run of fixed length.
Source: nanochat. It was quern's default until modded-nanogpt's 0.4 was better by 0.005 on rung 0 and by 0.004 on rung 1
in five pairs each, study ladder-offset.
Expected effect: slightly worse.
Verdict: worse on rung 0 (+0.0057 bits per byte, 5 pairs); undecided on rung 1 (+0.0003 bits per byte, 3 pairs);
multiplier × 0.997 [0.975, 1.023], grows. Study ladder-2.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="warmdown_65", train=TrainRecipe(warmdown_share=0.65))
