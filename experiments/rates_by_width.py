"""The head's rate falls as 1 / width, and the rate of the tables does not fall, where both fall as 1 / √width.

Hypothesis: what reads the residual stream sums over the width; what writes to it has a norm behind it.
Source: nanochat's branch `experiment_refactor` (pull request 800, September 2026), by a sweep at depth 20.
Expected effect: none.
Verdict: worse on rung 0 (+0.0194 bits per byte, 3 pairs); multiplier × 0.849 [0.816, 0.884]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0206 bits per byte, 3 pairs); multiplier × 0.890 [0.871, 0.910]. Study ladder.
"""

from __future__ import annotations

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Recipe
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Recipe) -> dict[str, GroupRule]:
    """The baseline's rules with other rates of head and tables; width_scale is (width / 768)^-½."""
    made, scale = table(recipe), recipe.optim.width_scale or 1.0
    factors = {"head": scale, "embedding": 1 / scale, "value_embeddings": 1 / scale}
    return made | {name: made[name]._replace(lr=made[name].lr * factor) for name, factor in factors.items()}


RECIPE = replace(BASELINE, name="rates_by_width", make_rules=rules)
