"""Ablation: the norm of Muon's update is not restored after the orthogonalisation.

Hypothesis: the iteration leaves norms that vary from step to step; a fixed norm is a fixed rate.
Source: Muon+ (arXiv 2602.21545), a later default of nanochat.
Expected effect: no difference, since five steps of Polar Express come close to the norm.
Verdict: undecided on rung 0 (+0.0029 bits per byte, 8 pairs); multiplier × 0.975 [0.950, 1.000]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0013 bits per byte, 8 pairs); multiplier × 0.993 [0.983, 1.001]. Study
ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.optim.muon import reduce_variance_
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    matrices = rules["matrices"]
    return rules | {"matrices": matrices._replace(rule=replace(matrices.rule, normalize_=reduce_variance_))}


RECIPE = replace(BASELINE, name="no_muon_plus", make_rules=rules)
