"""Ablation: AdamW's groups have no weight decay.

Hypothesis: embeddings and head need no decay.
Source: nanochat's experiment log, 2026-01-10: AdamW has none. Our default has nanochat's later values, 0.001 to
0.05.
Expected effect: no difference.
Verdict: no difference on rung 0 (+0.0020 bits per byte, 8 pairs); multiplier × 0.983 [0.966, 1.000]. Study ladder-2.
Before: old baseline: worse, small on rung 0 (+0.0023 bits per byte, 8 pairs); multiplier × 0.987 [0.979, 0.995]. Study
ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    return {
        name: group if group.rule.stacked else group._replace(rule=replace(group.rule, weight_decay=0.0))
        for name, group in table(recipe).items()
    }


RECIPE = replace(BASELINE, name="adamw_no_decay", make_rules=rules)
