"""DyT in place of the norms in blocks and before the head: gamma · tanh(alpha · x) + beta.

Hypothesis: an elementwise function is enough of a norm.
Source: Zhu et al. 2025 (arXiv 2503.10622). nanochat's experiment log, 2026-05-05: no variant beat the baseline, and
it was 10% slower. The norms of the embedding and of queries and keys stay; alpha starts at 1, the paper's value at a
width of 1,024.
Expected effect: worse.
Verdict: worse on rung 0 (+0.1218 bits per byte, 3 pairs); multiplier × 0.369 [0.349, 0.396]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0943 bits per byte, 3 pairs); multiplier × 0.592 [0.582, 0.604]. Study ladder.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quern.model.gpt import GPT, GPTBlock
from quern.model.layers import Draw
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class DyT(nn.Module):
    optimizer_groups: ClassVar = dict.fromkeys(("alpha", "gamma", "beta"), "residual_scales")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.gamma = nn.Parameter(torch.empty(width))
        self.beta = nn.Parameter(torch.empty(width))

    def init_parameters(self, draw: Draw) -> None:
        for p, value in ((self.alpha, 1.0), (self.gamma, 1.0), (self.beta, 0.0)):
            draw.fill(p, value)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.gamma * torch.tanh(self.alpha * x_BTD) + self.beta


class DyTBlock(GPTBlock):
    def __init__(self, attention: Any, mlp: nn.Module) -> None:
        super().__init__(attention, mlp)
        self.attention_dyt, self.mlp_dyt = (DyT(attention.query.in_features) for _ in range(2))

    def attention_norm(self, x_BTD: Tensor) -> Tensor:
        return self.attention_dyt(x_BTD)

    def mlp_norm(self, x_BTD: Tensor) -> Tensor:
        return self.mlp_dyt(x_BTD)


class DyTGPT(GPT):
    block_type = DyTBlock

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.last_dyt = DyT(shape.width)

    def leave(self, x_BTD: Tensor, halfway_BTD: Tensor) -> Tensor:
        return self.last_dyt(x_BTD - self.backout_scale * halfway_BTD)


RECIPE = replace(BASELINE, name="dyt", make_model=DyTGPT)
