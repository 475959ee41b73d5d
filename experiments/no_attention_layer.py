"""One layer, 7 of 12, has no attention.

Hypothesis: a layer past the middle needs no attention, so its time is saved.
Source: modded-nanogpt's walkthrough, which leaves out attention in layer 7.
Expected effect: slightly worse at equal steps, faster.
Verdict: worse on rung 0 (+0.0071 bits per byte, 5 pairs); multiplier × 0.997 [0.966, 1.030]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0072 bits per byte, 3 pairs); multiplier × 1.017 [1.001, 1.032]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor, nn

from quern.model.gpt import GPT, GPTBlock
from quern.model.unet import without_attention
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class SilentBlock(GPTBlock):
    """A block without attention; it takes the arguments of the others."""

    def __init__(self, mlp: nn.Module) -> None:
        nn.Module.__init__(self)
        self.mlp = mlp

    def forward(self, x_BTD: Tensor, x0_BTD: Tensor, scales: tuple[Tensor, Tensor], *_: object) -> Tensor:
        x_BTD = scales[0] * x_BTD + scales[1] * x0_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class NoAttentionGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.attention_layers.remove(without_attention(len(self.blocks)))

    def has_value_embedding(self, layer: int) -> bool:
        return layer != without_attention(self.shape.depth) and super().has_value_embedding(layer)

    def make_block(self, layer: int) -> GPTBlock:
        if layer == without_attention(self.shape.depth):
            return SilentBlock(self.make_mlp(layer))
        return super().make_block(layer)


RECIPE = replace(BASELINE, name="no_attention_layer", make_model=NoAttentionGPT)
