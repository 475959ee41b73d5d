"""Ablation: Muon without the running variance per row or column.

Hypothesis: rows and columns whose updates vary much should move less.
Source: NorMuon (arXiv 2510.05491). nanochat's experiment log, 2026-01-10: a very small improvement.
Expected effect: slightly worse.
Verdict: no difference on rung 0 (+0.0013 bits per byte, 8 pairs); multiplier × 0.989 [0.968, 1.012]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0011 bits per byte, 8 pairs); multiplier × 0.994 [0.987, 1.002]. Study
ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.optim.adamw import Scalar
from quern.optim.groups import GroupRule, table
from quern.optim.muon import restore_norm
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def normalize(x_NRC: Tensor, second: Tensor, beta2: Scalar) -> Tensor:
    return restore_norm(x_NRC)


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    matrices = rules["matrices"]
    return rules | {"matrices": matrices._replace(rule=replace(matrices.rule, normalize_=normalize))}


RECIPE = replace(
    BASELINE, name="no_variance_reduction", make_rules=rules, unused=(*BASELINE.unused, "optim.muon_beta2")
)
