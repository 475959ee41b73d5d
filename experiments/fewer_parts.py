"""Ablation: no smear, no backout, and Muon neither scales rows first nor restores the norm of its update.

Hypothesis: none of the four is missed beside the key offset, and the model, its twin and its exports get simpler.
Source: nanochat's experiment log, 2026-01-16 (smear and backout: negligible or no improvement); Muon+ and MuonEq-R are
later defaults of nanochat.
Expected effect: no difference.
Verdict: undecided on rung 0 (+0.0024 bits per byte, 8 pairs); multiplier × 0.980 [0.959, 1.002]. Study ladder-2.
Before: old baseline: undecided on rung 0 (+0.0012 bits per byte, 3 pairs); undecided on rung 1 (+0.0055 bits per byte,
3 pairs); multiplier × 0.953 [0.892, 1.027], unclear. Study ladder-offset.
"""

import math
from dataclasses import replace

from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.model.layers import Draw, norm
from quern.optim.groups import GroupRule, table
from quern.optim.muon import reduce_variance_
from quern.recipe import Resolved, ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class FewerPartsGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        del self.smear_gate

    def initial_scales(self) -> dict[str, Tensor]:
        scales = super().initial_scales()
        del scales["smear_scale"], scales["backout_scale"]
        return scales

    def init_parameters(self, draw: Draw) -> None:
        """The baseline's values, but no gate."""
        bound = math.sqrt(3.0 / self.embedding.embedding_dim)
        draw.normal(self.embedding.weight, 0.8)
        draw.normal(self.head.weight, 0.001)
        for embedding in self.value_embeddings.parameters():
            draw.uniform(embedding, -bound, bound)
        for name, value in self.initial_scales().items():
            draw.fill(getattr(self, name), value)

    def enter(self, tokens_BT: Tensor, context: Context) -> Tensor:
        return norm(self.embedding(tokens_BT))

    def leave(self, x_BTD: Tensor, halfway_BTD: Tensor) -> Tensor:
        return norm(x_BTD)


def unchanged(x_NRC: Tensor) -> Tensor:
    return x_NRC


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    matrices = rules["matrices"]
    rule = replace(matrices.rule, prepare=unchanged, normalize_=reduce_variance_)
    return rules | {"matrices": matrices._replace(rule=rule)}


RECIPE = replace(
    BASELINE,
    name="fewer_parts",
    make_model=FewerPartsGPT,
    make_rules=rules,
    unused=(*BASELINE.unused, "optim.smear_lr"),
)
