"""Ablation: in long layers too, all channels of a key have a position, and all are those of its own token.

Hypothesis: a query that matches a token's predecessor reads the token in one layer: one-layer induction.
Source: modded-nanogpt's pull request 169: 50 steps fewer of 2,000 with the key offset. It became quern's default after
five pairs on rung 2 of the study ladder were better by 0.008.
Expected effect: worse.
Verdict: worse on rung 0 (+0.1351 bits per byte, 3 pairs); worse on rung 1 (+0.0487 bits per byte, 3 pairs); undecided
on rung 2 (+0.0074 bits per byte, 3 pairs); multiplier × 0.928 [0.883, 0.975], grows. Study ladder-2.
"""

from dataclasses import replace

from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="no_key_offset", model=replace(BASELINE.model, key_offset=False))
