"""The baseline with every constant of its optimizer as a field of the recipe, for a sweep over all of them.

The fields are those of the groups that AdamW updates (`optim/constants.py`), such as optim.head-beta1, and the momentum
of Muon. Their defaults are the baseline's: a momentum that stays the same. The space is rates.toml:

    quern lab sweep experiments/studies/rates.py --space experiments/studies/rates.toml --train.steps 500

Source: nanochat's optimizer sweep (January 2026): about 320 runs over rates, betas, momentum and decay of each group.
At depth 12 two sets of values gained 0.002 bits per byte; at depth 20 only the first beta of the x0 scales (0.96) was
left of it, with 0.0007.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

from quern.optim.adamw import AdamW
from quern.optim.constants import adamw_groups
from quern.optim.groups import GroupRule, table
from quern.optim.schedule import Multipliers, learning_rate, warmup_stable_decay
from quern.recipe import OptimRecipe, Resolved, TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

CONSTANTS = ("beta1", "beta2", "weight_decay")
GROUPS = adamw_groups(OptimRecipe(), 4)
DEFAULTS = {f"{group}_{name}": getattr(constants, name) for group, constants in GROUPS.items() for name in CONSTANTS}
AllConstants: Any = make_dataclass(
    "AllConstants",
    [(name, "float", field(default=value)) for name, value in DEFAULTS.items()],
    bases=(OptimRecipe,),
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class Momentum(TrainRecipe):
    """With Muon's momentum, which goes from start to peak and, in the warm-down, on to final."""

    momentum_start: float = 0.95
    momentum_peak: float = 0.95
    momentum_final: float = 0.95
    momentum_warmup_steps: int = 400


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """The baseline's rules with the recipe's constants."""
    found = table(recipe)
    for group in GROUPS:
        beta1, beta2, decay = (getattr(recipe.optim, f"{group}_{name}") for name in CONSTANTS)
        if default := DEFAULTS[f"{group}_weight_decay"]:  # the baseline's may follow batch and horizon
            decay *= found[group].rule.weight_decay / default
        found[group] = found[group]._replace(rule=AdamW((beta1, beta2), recipe.optim.eps, decay))
    return found


def schedule(train: Momentum) -> Callable[[int], Multipliers]:
    """The baseline's schedule with the recipe's momentum."""
    baseline, steps = warmup_stable_decay(train), train.steps

    def told(step: int) -> Multipliers:
        start, peak, final = train.momentum_start, train.momentum_peak, train.momentum_final
        up = min(1.0, step / train.momentum_warmup_steps)
        down = 1 - learning_rate(step, steps, warmup_steps=0, warmdown_share=train.warmdown_share, final=0.0)
        return baseline(step)._replace(momentum=start + (peak - start) * up + (final - peak) * down)

    return told


RECIPE = replace(
    BASELINE, name="rates", make_rules=rules, make_schedule=schedule, optim=AllConstants(), train=Momentum()
)
