"""MuonH with learned gains: a factor per channel at the input of attention and feed-forward.

Hypothesis: gains give back the scales that the fixed norm takes away.
Source: the post on Hyperball, whose gains preserve expressivity. nanochat's experiment log, 2026-01-29: still worse,
with gains before and after the blocks' parts and with several initial values. Here: before, from 1.
Expected effect: worse, but better than muon_h.
Verdict: worse on rung 0 (+0.2209 bits per byte, 3 pairs); multiplier × 0.172 [0.161, 0.188]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0898 bits per byte, 3 pairs); multiplier × 0.607 [0.592, 0.624]. Study ladder.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quern.model.gpt import GPT, CausalSelfAttention, GPTBlock
from quern.model.layers import Draw, SquaredReluMLP
from quern.optim.groups import GroupRule, table
from quern.optim.muon import MuonH
from quern.recipe import OptimRecipe, Resolved
from quern.recipes.gpt import RECIPE as BASELINE

OWN_INITIAL_VALUES = ("blocks.*.attention.out.weight", "blocks.*.mlp.down.weight")


class Attention(CausalSelfAttention):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.normal(self.out.weight, 0.4 * self.out.in_features**-0.5)


class MLP(SquaredReluMLP):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.normal(self.down.weight, 0.4 * self.down.in_features**-0.5)


class GainBlock(GPTBlock):
    optimizer_groups: ClassVar = {"attention_gain": "residual_scales", "mlp_gain": "residual_scales"}

    def __init__(self, attention: Any, mlp: Any) -> None:
        super().__init__(attention, mlp)
        width = attention.query.in_features
        self.attention_gain, self.mlp_gain = (nn.Parameter(torch.empty(width)) for _ in range(2))

    def init_parameters(self, draw: Draw) -> None:
        draw.fill(self.attention_gain, 1.0)
        draw.fill(self.mlp_gain, 1.0)

    def attention_norm(self, x_BTD: Tensor) -> Tensor:
        return super().attention_norm(x_BTD) * self.attention_gain

    def mlp_norm(self, x_BTD: Tensor) -> Tensor:
        return super().mlp_norm(x_BTD) * self.mlp_gain


class GainGPT(GPT):
    block_type, attention_type, mlp_type = GainBlock, Attention, MLP


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    rules = table(recipe)
    return rules | {"matrices": rules["matrices"]._replace(rule=MuonH(recipe.optim.muon_steps))}


RECIPE = replace(
    BASELINE,
    name="muon_h_gains",
    make_model=GainGPT,
    make_rules=rules,
    optim=OptimRecipe(matrix_lr=0.005),
    unused=(*BASELINE.unused, "optim.muon_beta2", "optim.matrix_decay"),
)
