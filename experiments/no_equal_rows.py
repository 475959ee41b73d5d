"""Ablation: the rows of Muon's momentum are not scaled to one norm first.

Hypothesis: loud rows dominate the spectrum, and quiet rows are not orthogonalised in five steps.
Source: MuonEq-R (arXiv 2603.28254), a later default of nanochat.
Expected effect: slightly worse.
Verdict: no difference on rung 0 (+0.0006 bits per byte, 8 pairs); multiplier × 0.995 [0.978, 1.014]. Study ladder-2.
Before: old baseline: undecided on rung 0 (-0.0023 bits per byte, 3 pairs); undecided on rung 1 (+0.0020 bits per byte,
3 pairs); multiplier × 0.982 [0.911, 1.054], unclear. Study ladder-offset. Before: old baseline: better, small on rung 0
(-0.0029 bits per byte, 8 pairs); multiplier × 1.016 [1.009, 1.024]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def unchanged(x_NRC: Tensor) -> Tensor:
    return x_NRC


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    matrices = rules["matrices"]
    return rules | {"matrices": matrices._replace(rule=replace(matrices.rule, prepare=unchanged))}


RECIPE = replace(BASELINE, name="no_equal_rows", make_rules=rules)
