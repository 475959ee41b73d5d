"""The model at the end of the run is an exponential moving average of its weights.

Hypothesis: an average over the last steps removes noise that the warm-down does not.
Source: Polyak averaging; EMA and SWA are mentioned in nanochat's experiment log, 2026-03-24: they did not help.
Expected effect: no difference, since the rate falls almost to zero. Bits per byte before the last step are those of
the plain weights; so are those at the end if the run skipped a step.
Verdict: no difference on rung 0 (+0.0016 bits per byte, 8 pairs); multiplier × 0.987 [0.973, 1.002]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0013 bits per byte, 5 pairs); multiplier × 0.992 [0.984, 1.002]. Study
ladder.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quern.optim.adamw import AdamW, Scalar
from quern.optim.groups import GroupRule, table
from quern.optim.muon import Muon
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE

MEMORY_SHARE = 0.02
"""The average's time constant in steps, as a share of the run."""


class Averaged:
    """Beside a rule: keeps the average, and replaces the weights by it at the last update."""

    def init_state(self: Any, master: Tensor) -> dict[str, Tensor]:
        return {**super().init_state(master), "average": master.clone()}

    def scalars(self: Any, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        forget = 1 / max(1.0, MEMORY_SHARE * self.total_steps)
        return {**super().scalars(step, lr, momentum, decay), "forget": forget, "last": float(step == self.total_steps)}

    def update_(
        self: Any,
        master: Tensor,
        grad: Tensor,
        state: Any,
        scalars: dict[str, Scalar],
        *,
        out: Tensor | None,
        **of: Any,
    ) -> None:
        inner = {name: value for name, value in scalars.items() if name not in ("forget", "last")}
        super().update_(master, grad, state, inner, out=None, **of)
        state["average"].lerp_(master, scalars["forget"])
        master.lerp_(state["average"], scalars["last"])
        if out is not None:
            out.copy_(master)


@dataclass(frozen=True)
class AveragedMuon(Averaged, Muon):
    total_steps: int = 1


@dataclass(frozen=True)
class AveragedAdamW(Averaged, AdamW):
    total_steps: int = 1


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    kinds = {Muon: AveragedMuon, AdamW: AveragedAdamW}
    return {
        name: group._replace(rule=kinds[type(group.rule)](**vars(group.rule), total_steps=recipe.train.steps))
        for name, group in table(recipe).items()
    }


RECIPE = replace(BASELINE, name="ema", make_rules=rules)
