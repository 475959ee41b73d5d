"""A bundle: value embeddings that start at N(0, 1), rates by another power of the width, and no smear.

Hypothesis: the three, which a branch of nanochat has together, help together here too.
Source: nanochat's branch `experiment_refactor` (pull request 800, September 2026). Its short window of 512 tokens is
longer than the contexts of the ladder's rungs, so it is not part of this.
Expected effect: worse; each alone may help.
Verdict: worse on rung 0 (+0.0456 bits per byte, 3 pairs); multiplier × 0.683 [0.644, 0.734]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0424 bits per byte, 3 pairs); multiplier × 0.788 [0.764, 0.816]. Study ladder.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.model.layers import Draw, norm
from quern.optim.groups import GroupRule, table
from quern.recipe import ModelRecipe, Recipe
from quern.recipes.gpt import RECIPE as BASELINE

OWN_INITIAL_VALUES = ("value_embeddings.*",)


class SeptemberGPT(GPT):
    def __init__(self, shape: ModelRecipe) -> None:
        super().__init__(shape)
        del self.smear_gate

    def initial_scales(self) -> dict[str, Tensor]:
        scales = super().initial_scales()
        del scales["smear_scale"]
        return scales

    def init_parameters(self, draw: Draw) -> None:
        draw.normal(self.embedding.weight, 0.8)
        draw.normal(self.head.weight, 0.001)
        for values in self.value_embeddings.parameters():
            draw.normal(values, 1.0)
        for name, value in self.initial_scales().items():
            draw.fill(getattr(self, name), value)

    def enter(self, tokens_BT: Tensor, context: Context) -> Tensor:
        return norm(self.embedding(tokens_BT))


def rules(recipe: Recipe) -> dict[str, GroupRule]:
    """The baseline's rules; the head's rate falls as 1 / width, that of the tables not (width_scale: its root)."""
    made, scale = table(recipe), recipe.optim.width_scale or 1.0
    factors = {"head": scale, "embedding": 1 / scale, "value_embeddings": 1 / scale}
    return made | {name: made[name]._replace(lr=made[name].lr * factor) for name, factor in factors.items()}


RECIPE = replace(
    BASELINE,
    name="september",
    make_model=SeptemberGPT,
    make_rules=rules,
    unused=(*BASELINE.unused, "optim.smear_lr"),
)
