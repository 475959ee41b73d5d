"""Ablation: the head's rate falls with the batch as the other rates do.

Hypothesis: the slower fall, our default, matters for runs whose batches are small: the head begins at zero, and is half
of a small model.
Source: the studies `rates` and `head` here: of 34 constants the head's rate decides most, and four times the rate is
better. nanochat's experiment log scales all rates with the square root, at batches of 2^18 tokens and more.
Expected effect: worse, the smaller the batch.
Verdict: worse on rung 0 (+0.0358 bits per byte, 3 pairs); multiplier × 0.741 [0.714, 0.771]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0353 bits per byte, 3 pairs); multiplier × 0.820 [0.803, 0.837]. Study ladder.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """The baseline's rules with another rate of the head."""
    made, scale = table(recipe), recipe.optim.lr_scale
    root = 1.0 if scale is None else math.sqrt(scale)
    return made | {"head": made["head"]._replace(lr=made["head"].lr * root)}


RECIPE = replace(BASELINE, name="head_square_root", make_rules=rules)
