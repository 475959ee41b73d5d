"""The decay of the matrices falls with the batch so that rate · decay · steps stays what it is at the reference.

Hypothesis: rate · decay is the share of a matrix that is forgotten in one step. The rates fall with the cube root of
the batch, the decay with the square root, so small batches forget more over a run than large ones. Matrices that forget
in some tens of steps learn no induction.
Source: Wang and Aitchison 2024 (arXiv 2405.13698): the time in which AdamW forgets should be a constant share of the
run.
Expected effect: better at small batches.
Verdict: better, small on rung 0 (-0.0045 bits per byte, 8 pairs); multiplier × 1.039 [1.018, 1.061]. Study ladder-2.
Before: old baseline: better, small on rung 0 (-0.0033 bits per byte, 8 pairs); multiplier × 1.019 [1.008, 1.030]. Study
ladder.

Induction does not depend on it: after 800 steps on the built-in world a model with this decay copies the letters of
lettered lists no better than the baseline, at chance.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE
from quern.resolve import REFERENCE_BATCH_TOKENS


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """The baseline's rules with another decay of the matrices."""
    made, scale, batch_tokens = table(recipe), recipe.optim.lr_scale, recipe.train.batch_tokens
    if scale is None or batch_tokens is None:
        return made
    share = (batch_tokens / REFERENCE_BATCH_TOKENS) ** 0.5 / scale
    matrices = made["matrices"]
    rule = replace(matrices.rule, weight_decay=matrices.rule.weight_decay * share)
    return made | {"matrices": matrices._replace(rule=rule)}


RECIPE = replace(BASELINE, name="decay_by_rate", make_rules=rules)
