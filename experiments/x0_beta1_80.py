"""The x0 scalars have a beta1 of 0.8, not 0.96.

Hypothesis: these few scalars need a long mean of their gradients, but not too long.
Source: nanochat's experiment log, 2026-01-19, depth 20: 0.96 gained 0.0007 bits per byte over 0.8, while 0.98 lost
0.0033.
Expected effect: 0.0007 bits per byte worse, or no difference.
Verdict: worse on rung 0 (+0.0146 bits per byte, 5 pairs); multiplier × 0.884 [0.840, 0.932]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0081 bits per byte, 5 pairs); multiplier × 0.955 [0.941, 0.971]. Study ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE

BETA1 = 0.8


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    x0 = rules["x0_scales"]
    return rules | {"x0_scales": x0._replace(rule=replace(x0.rule, betas=(BETA1, x0.rule.betas[1])))}


RECIPE = replace(BASELINE, name="x0_beta1_80", make_rules=rules)
