"""U-net skips: the second half of the layers gets the outputs of the first half, the last first.

Hypothesis: late layers profit from early states with a path of their own.
Source: modded-nanogpt's walkthrough, with learned factors that start at 1, and no backout beside it. Here they start
at 0, so that the first step is the baseline's.
Expected effect: no difference, since x0 and backout do a part of the same.
Verdict: undecided on rung 0 (+0.0015 bits per byte, 8 pairs); multiplier × 0.987 [0.943, 1.032]. Study ladder-2.
Before: old baseline: undecided on rung 0 (+0.0045 bits per byte, 8 pairs); multiplier × 0.975 [0.940, 1.010]. Study
ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class SkipsGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.kept_layers = {*self.kept_layers, *range(len(self.blocks) // 2)}

    def initial_scales(self) -> dict[str, Tensor]:
        return super().initial_scales() | {"skip_scales": torch.zeros(len(self.blocks) // 2)}

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        depth = len(self.blocks)
        if layer < depth - depth // 2:
            return x_BTD
        source = depth - 1 - layer
        return x_BTD + self.skip_scales[source] * kept[source]


RECIPE = replace(BASELINE, name="unet_skips", make_model=SkipsGPT)
