"""Muon's rate is raised for wide matrices, not for tall ones.

Hypothesis: the second matrix of the feed-forward wants the double rate, not the first one.
Source: nanochat's pull request 492, from modded-nanogpt. nanochat's experiment log, 2026-02-03: slightly worse at
depth 12.
Expected effect: slightly worse, or no difference.
Verdict: no difference on rung 0 (-0.0003 bits per byte, 8 pairs); multiplier × 1.002 [0.983, 1.020]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0007 bits per byte, 8 pairs); multiplier × 0.996 [0.985, 1.007]. Study
ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.optim.adamw import Scalar
from quern.optim.groups import GroupRule, table
from quern.optim.muon import cautious_step_
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def flipped_step_(master_NRC: Tensor, update_NRC: Tensor, lr: Scalar, weight_decay: Scalar) -> None:
    """The rate comes with the factor sqrt(max(1, R/C)); it leaves with sqrt(max(1, C/R)): sqrt(C/R) in either case."""
    cautious_step_(master_NRC, update_NRC, lr * (master_NRC.size(-1) / master_NRC.size(-2)) ** 0.5, weight_decay)


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    matrices = rules["matrices"]
    return rules | {"matrices": matrices._replace(rule=replace(matrices.rule, apply_=flipped_step_))}


RECIPE = replace(BASELINE, name="flipped_muon_rate", make_rules=rules)
