"""Every peak rate is an eighth of the baseline's.

Hypothesis: the baseline's rates are close to the best ones.
Source: a known answer, to test a rung of the ladder with.
Expected effect: worse.
Verdict: worse on rung 0 (+0.3843 bits per byte, 3 pairs); worse on rung 1 (+0.2787 bits per byte, 3 pairs); multiplier
× 0.092 [0.088, 0.097], grows. Study ladder-2. Before: old baseline: worse on rung 0 (+0.4172 bits per byte, 3 pairs);
multiplier × 0.047 [0.042, 0.051]. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.2897 bits per byte, 3
pairs); multiplier × 0.214 [0.209, 0.220]. Study ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE

FACTOR = 0.125


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    return {name: group._replace(lr=FACTOR * group.lr) for name, group in table(recipe).items()}


RECIPE = replace(BASELINE, name="eighth_rate", make_rules=rules)
