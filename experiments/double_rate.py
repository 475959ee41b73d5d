"""Every peak rate is twice the baseline's.

Hypothesis: the baseline's rates are close to the best ones.
Source: a known answer, to test a rung of the ladder with.
Expected effect: worse, slightly.
Verdict: undecided on rung 0 (-0.0027 bits per byte, 8 pairs); worse on rung 1 (+0.0122 bits per byte, 3 pairs); worse
on rung 2 (+0.0206 bits per byte, 3 pairs); multiplier × 0.811 [0.783, 0.841], fades. Study ladder-2. Before: old
baseline: undecided on rung 0 (+0.0024 bits per byte, 3 pairs); undecided on rung 1 (+0.0079 bits per byte, 3 pairs);
multiplier × 0.933 [0.900, 0.976], unclear. Study ladder-offset. Before: old baseline: better on rung 0 (-0.0072 bits
per byte, 8 pairs); undecided on rung 1 (+0.0013 bits per byte, 3 pairs); multiplier × 0.992 [0.907, 1.091], unclear.
Study ladder.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE

FACTOR = 2.0


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    return {name: group._replace(lr=FACTOR * group.lr) for name, group in table(recipe).items()}


RECIPE = replace(BASELINE, name="double_rate", make_rules=rules)
