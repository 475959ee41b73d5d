"""AdamH on the head: a matrix of fixed norm, with one learned factor of the logits.

Hypothesis: the head, too, profits from a fixed norm.
Source: the post on Hyperball. nanochat's experiment log, 2026-01-29: AdamH alone plateaus, since the head must grow
to be confident; with a learned factor it is still worse. Here: with the factor, which starts where the first logits
are the baseline's.
Expected effect: worse.
Verdict: worse on rung 0 (+0.0397 bits per byte, 3 pairs); multiplier × 0.717 [0.684, 0.754]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0488 bits per byte, 3 pairs); multiplier × 0.760 [0.736, 0.785]. Study ladder.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quern.model.gpt import GPT
from quern.model.layers import Draw
from quern.optim.adamw import Scalars, State
from quern.optim.groups import GroupRule, table
from quern.optim.muon import norms, sphere_step_
from quern.recipe import OptimRecipe, Resolved
from quern.recipes.gpt import RECIPE as BASELINE

OWN_INITIAL_VALUES = ("head.weight",)


@dataclass(frozen=True)
class AdamH:
    """Adam's direction, which needs no bias correction of m: it has no effect on a normalised update. See `MuonH`."""

    betas: tuple[float, float]
    eps: float

    stacked: ClassVar[bool] = True

    def init_state(self, master: Tensor) -> State:
        return {"m": torch.zeros_like(master), "v": torch.zeros_like(master), "radius": norms(master)}

    def scalars(self, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        beta1, beta2 = self.betas
        return {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": self.eps, "correction": (1 - beta2**step) ** 0.5}

    def update_(
        self, master: Tensor, grad: Tensor, state: State, scalars: Scalars, *, dtype: torch.dtype, out: Tensor | None
    ) -> None:
        grad = grad.to(master.dtype)
        state["m"].lerp_(grad, 1 - scalars["beta1"])
        state["v"].lerp_(grad.square(), 1 - scalars["beta2"])
        update = state["m"] / (state["v"].sqrt() / scalars["correction"] + scalars["eps"])
        sphere_step_(master, update, state["radius"], scalars["lr"])
        if out is not None:
            out.copy_(master)


class ScaledHeadGPT(GPT):
    optimizer_groups: ClassVar = {**GPT.optimizer_groups, "head_scale": "x0_scales"}

    def initial_scales(self) -> dict[str, Tensor]:
        return super().initial_scales() | {"head_scale": torch.full((1,), 0.001 * self.embedding.embedding_dim**0.5)}

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.normal(self.head.weight, self.embedding.embedding_dim**-0.5)

    def leave(self, x_BTD: Tensor, halfway_BTD: Tensor) -> Tensor:
        return self.head_scale * super().leave(x_BTD, halfway_BTD)


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    return rules | {"head": rules["head"]._replace(rule=AdamH((0.8, 0.96), recipe.optim.eps))}


RECIPE = replace(
    BASELINE, name="adam_h_head", make_model=ScaledHeadGPT, make_rules=rules, optim=OptimRecipe(head_lr=0.01)
)
