"""Ablation: no layer attends; the smear alone looks back, by one token.

Hypothesis: without attention a model is little more than a bigram.
Source: a known answer, to test a rung of the ladder with.
Expected effect: worse.
Verdict: worse on rung 0 (+0.2827 bits per byte, 3 pairs); worse on rung 1 (+0.3466 bits per byte, 3 pairs); multiplier
× 0.076 [0.072, 0.082], fades. Study ladder-2. Before: old baseline: worse on rung 0 (+0.2737 bits per byte, 3 pairs);
multiplier × 0.164 [0.152, 0.177]. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.1421 bits per byte, 5
pairs); multiplier × 0.600 [0.589, 0.614]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor, nn

from quern.model.gpt import GPT, GPTBlock
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
        self.attention_layers.clear()

    def has_value_embedding(self, layer: int) -> bool:
        return False

    def make_block(self, layer: int) -> GPTBlock:
        return SilentBlock(self.make_mlp(layer))


RECIPE = replace(BASELINE, name="no_attention", make_model=NoAttentionGPT)
