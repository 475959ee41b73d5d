"""Weight decay as in the log: 0.2 · (12 / depth)², linear to zero, whatever the batch and horizon.

Hypothesis: the decay should follow depth alone.
Source: nanochat's experiment log, 2026-01-10: the best decay was 0.40, 0.22, 0.10, 0.08 at depth 8, 12, 16, 20. Our
default follows sqrt(batch) / horizon, as nanochat's later rule does.
Expected effect: no difference at the log's batch and horizon; far from them, worse.
Verdict: worse on rung 0 (+0.0206 bits per byte, 3 pairs); multiplier × 0.841 [0.802, 0.879]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0164 bits per byte, 3 pairs); multiplier × 0.911 [0.886, 0.937]. Study ladder.
"""

from collections.abc import Callable
from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.recipe import OptimRecipe, Resolved, ResolvedTrain
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    matrices = rules["matrices"]
    decay = matrices.rule.weight_decay * (12 / recipe.depth) ** 2
    return rules | {"matrices": matrices._replace(rule=replace(matrices.rule, weight_decay=decay))}


def schedule(train: ResolvedTrain) -> Callable[[int], Multipliers]:
    told, steps = warmup_stable_decay(train), train.steps
    return lambda step: told(step)._replace(decay=1 - min(1.0, step / steps))


RECIPE = replace(
    BASELINE,
    name="log_decay",
    make_rules=rules,
    make_schedule=schedule,
    optim=OptimRecipe(matrix_decay=0.2, decay_scale=1.0),
)
