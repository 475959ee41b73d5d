"""Every block also reads a mixture of all earlier streams, with weights that the current one chooses.

Hypothesis: dense connections let a token fetch what later layers have overwritten.
Source: MUDD (Xiao et al. 2025, arXiv 2502.12170), a speedrun record. There, queries, keys, values and stream have
mixtures of their own from a small network; here one linear map gives one mixture, which starts at 0.
Expected effect: better at equal steps, slower, with more memory.
Verdict: undecided on rung 0 (+0.0031 bits per byte, 8 pairs); multiplier × 0.973 [0.943, 1.009]. Study ladder-2.
Before: old baseline: worse, small on rung 0 (+0.0041 bits per byte, 8 pairs); multiplier × 0.976 [0.962, 0.993]. Study
ladder.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.model.layers import Draw, norm
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class DenseGPT(GPT):
    optimizer_groups: ClassVar = {**GPT.optimizer_groups, "mixers": "gates"}

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.kept_layers = set(range(len(self.blocks)))
        self.mixers = nn.ModuleList(nn.Linear(shape.width, layer, bias=False) for layer in range(1, len(self.blocks)))

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        for mixer in self.mixers.parameters():
            draw.fill(mixer, 0.0)

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        if layer == 0:
            return x_BTD
        weights_BTL = self.mixers[layer - 1](norm(x_BTD))
        streams_BTLD = torch.stack([kept[source] for source in range(-1, layer - 1)], dim=2)
        return x_BTD + (weights_BTL[..., None] * streams_BTLD).sum(2)


RECIPE = replace(BASELINE, name="dense_connections", make_model=DenseGPT)
