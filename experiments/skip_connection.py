"""A skip connection from a quarter of the layers to half of them.

Hypothesis: the second half profits from an early, less processed stream.
Source: nanochat's experiment log, 2026-01-16 (from modded-nanogpt): slightly worse, and 2 GB more memory. The scale
of the skip starts at 0.
Expected effect: slightly worse, or no difference.
Verdict: undecided on rung 0 (-0.0001 bits per byte, 8 pairs); multiplier × 1.001 [0.969, 1.033]. Study ladder-2.
Before: old baseline: no difference on rung 0 (-0.0001 bits per byte, 8 pairs); multiplier × 1.001 [0.986, 1.015]. Study
ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class SkipGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.skip_from = max(0, len(self.blocks) // 4 - 1)
        self.skip_to = max(len(self.blocks) // 2, self.skip_from + 1)
        self.kept_layers = {*self.kept_layers, self.skip_from}

    def initial_scales(self) -> dict[str, Tensor]:
        return super().initial_scales() | {"skip_scale": torch.zeros(1)}

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        return x_BTD + self.skip_scale * kept[self.skip_from] if layer == self.skip_to else x_BTD


RECIPE = replace(BASELINE, name="skip_connection", make_model=SkipGPT)
