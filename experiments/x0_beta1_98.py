"""The x0 scalars have a beta1 of 0.98, not 0.96.

Hypothesis: these few scalars need a long mean of their gradients, but not too long.
Source: nanochat's experiment log, 2026-01-19, depth 20: 0.96 gained 0.0007 bits per byte over 0.8, while 0.98 lost
0.0033.
Expected effect: worse: the log found a cliff above 0.96.
Verdict: worse on rung 0 (+0.0052 bits per byte, 8 pairs); multiplier × 0.957 [0.927, 0.988]. Study ladder-2. Before:
old baseline: no difference on rung 0 (+0.0008 bits per byte, 8 pairs); multiplier × 0.996 [0.981, 1.010]. Study ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE

BETA1 = 0.98


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    x0 = rules["x0_scales"]
    return rules | {"x0_scales": x0._replace(rule=replace(x0.rule, betas=(BETA1, x0.rule.betas[1])))}


RECIPE = replace(BASELINE, name="x0_beta1_98", make_rules=rules)
