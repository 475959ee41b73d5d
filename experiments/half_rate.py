"""Every peak rate is half the baseline's.

Hypothesis: the baseline's rates are close to the best ones.
Source: a known answer, to test a rung of the ladder with.
Expected effect: worse, slightly.
Verdict: worse on rung 0 (+0.0433 bits per byte, 3 pairs); worse on rung 1 (+0.0234 bits per byte, 3 pairs); multiplier
× 0.806 [0.785, 0.828], grows. Study ladder-2. Before: old baseline: worse on rung 0 (+0.0521 bits per byte, 3 pairs);
multiplier × 0.660 [0.630, 0.691]. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.0392 bits per byte, 3
pairs); multiplier × 0.802 [0.788, 0.817]. Study ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE

FACTOR = 0.5


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    return {name: group._replace(lr=FACTOR * group.lr) for name, group in table(recipe).items()}


RECIPE = replace(BASELINE, name="half_rate", make_rules=rules)
