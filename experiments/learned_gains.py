"""The norms in blocks have a learned factor for each channel.

Hypothesis: gains let a block choose its channels.
Source: RMSNorm as published (arXiv 1910.07467); modded-nanogpt and nanochat have none, since the next matrix can
hold them.
Expected effect: no difference.
Verdict: no difference on rung 0 (-0.0005 bits per byte, 8 pairs); multiplier × 1.004 [0.986, 1.023]. Study ladder-2.
Before: old baseline: no difference on rung 0 (-0.0011 bits per byte, 5 pairs); multiplier × 1.006 [0.994, 1.018]. Study
ladder.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quern.model.gpt import GPT, GPTBlock
from quern.model.layers import Draw
from quern.recipes.gpt import RECIPE as BASELINE


class GainBlock(GPTBlock):
    optimizer_groups: ClassVar = {"attention_gain": "residual_scales", "mlp_gain": "residual_scales"}

    def __init__(self, attention: Any, mlp: nn.Module) -> None:
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
    block_type = GainBlock


RECIPE = replace(BASELINE, name="learned_gains", make_model=GainGPT)
