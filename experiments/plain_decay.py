"""Ablation: weight decay everywhere, not only where the update shrinks the weight.

Hypothesis: decay against the direction of the update wastes a part of the step.
Source: Cautious weight decay (arXiv 2510.12402). nanochat's experiment log, 2026-01-10: the cautious form was better
than the plain one.
Expected effect: slightly worse at the same decay, which then acts on about twice as many weights.
Verdict: worse on rung 0 (+0.0465 bits per byte, 3 pairs); multiplier × 0.678 [0.618, 0.744]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0263 bits per byte, 3 pairs); multiplier × 0.862 [0.840, 0.885]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.optim.adamw import Scalar
from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def plain_step_(master_NRC: Tensor, update_NRC: Tensor, lr: Scalar, weight_decay: Scalar) -> None:
    master_NRC.mul_(1 - lr * weight_decay).sub_(update_NRC * lr)


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    matrices = rules["matrices"]
    return rules | {"matrices": matrices._replace(rule=replace(matrices.rule, apply_=plain_step_))}


RECIPE = replace(BASELINE, name="plain_decay", make_rules=rules)
