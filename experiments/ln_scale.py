"""The input of a block's parts is divided by the root of the layer's number.

Hypothesis: the stream grows with depth; smaller inputs keep deep layers effective.
Source: Sun et al. 2025 (arXiv 2502.05795), by way of parameter-golf. nanochat's experiment log, 2026-03-24: no help.
Expected effect: no difference.
Verdict: worse on rung 0 (+0.0068 bits per byte, 5 pairs); multiplier × 0.944 [0.918, 0.969]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0076 bits per byte, 3 pairs); multiplier × 0.958 [0.942, 0.973]. Study ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.gpt import GPT, GPTBlock
from quern.recipes.gpt import RECIPE as BASELINE


class ScaledBlock(GPTBlock):
    scale: Tensor

    def attention_norm(self, x_BTD: Tensor) -> Tensor:
        return self.scale * super().attention_norm(x_BTD)

    def mlp_norm(self, x_BTD: Tensor) -> Tensor:
        return self.scale * super().mlp_norm(x_BTD)


class ScaledGPT(GPT):
    def make_block(self, layer: int) -> ScaledBlock:
        block = ScaledBlock(self.make_attention(layer), self.make_mlp(layer))
        # A tensor: a number would compile every layer by itself.
        block.register_buffer("scale", torch.tensor((layer + 1) ** -0.5), persistent=False)
        return block


RECIPE = replace(BASELINE, name="ln_scale", make_model=ScaledGPT)
