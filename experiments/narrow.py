"""Narrower models below depth 8: 8 · depth² channels, four layers of 128, not of 256.

Hypothesis: at depth 4 the head has most of the products, and its cost grows with the width. So a narrower model is
better for the same time.
Source: the study `isoflop` here, by which models a fifth as large are better for ten minutes on a CPU. nanochat has 64
channels per layer at every depth.
Expected effect: better at equal FLOPs and at equal time; a step costs less, so do not compare at equal steps.
Verdict: not yet measured.

Bits per byte are not all. In the minutes of the quickstart the narrow model predicts the built-in world better (0.250
bits per byte, four layers of 256: 0.259; one run each) and answers its questions worse: it chooses between two things
at the rate of chance (.230), and the wider one is right in .900. So the narrow rule was a default for a while and is
none.

With the FLOPs of 100 steps of the narrow model, the study gives the wide one 31 steps, so its differences are those of
very short runs. Single runs of one seed, before it: 14.6 MB of English, 4,096 tokens a step, nine minutes on one core,
at rates by the square root of the batch. Four layers of 256: 1.610 bits per byte; 3 of 192: 1.567; 2 of 128: 1.573; 4
of 128: 1.551.

For another depth below 8, set --model.width to 8 times the square of the depth.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="narrow", model=ModelRecipe(width=128))
