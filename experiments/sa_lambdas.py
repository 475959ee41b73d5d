"""Learned factors of the values and of the output of attention in each layer.

Hypothesis: factors let layers grow at the rate of scalars rather than of matrices.
Source: modded-nanogpt. nanochat's experiment log, 2026-01-18: 0.0001 better. QK norm takes away the effect of a
factor on queries and keys, so only values and output have one here.
Expected effect: no difference.
Verdict: no difference on rung 0 (-0.0002 bits per byte, 7 pairs); multiplier × 1.002 [0.984, 1.020]. Study ladder-2.
Before: old baseline: no difference on rung 0 (-0.0003 bits per byte, 5 pairs); multiplier × 1.001 [0.990, 1.012]. Study
ladder.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quern.model.gpt import GPT, CausalSelfAttention
from quern.model.layers import Draw
from quern.recipes.gpt import RECIPE as BASELINE


class ScaledAttention(CausalSelfAttention):
    optimizer_groups: ClassVar = {**CausalSelfAttention.optimizer_groups, "scales": "residual_scales"}

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.scales = nn.Parameter(torch.empty(2))

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.fill(self.scales, 1.0)

    def mix_values(self, x_BTD: Tensor, v_BTKE: Tensor, value_embedding: Tensor | None) -> Tensor:
        return super().mix_values(x_BTD, self.scales[0] * v_BTKE, value_embedding)

    def project_out(self, x_BTD: Tensor, y_BTHE: Tensor) -> Tensor:
        return self.scales[1] * super().project_out(x_BTD, y_BTHE)


class ScaledGPT(GPT):
    attention_type = ScaledAttention


RECIPE = replace(BASELINE, name="sa_lambdas", make_model=ScaledGPT)
