"""Every block reads a part of the stream of the token before.

Hypothesis: local patterns need no attention, so heads are free for distant ones.
Source: Canon layers (Allen-Zhu 2025, Physics of Language Models 4.1) and RWKV's token shift. Here: one factor for
each layer, which starts at 0, before attention only.
Expected effect: better at equal steps.
Verdict: no difference on rung 0 (-0.0007 bits per byte, 8 pairs); multiplier × 1.006 [0.980, 1.034]. Study ladder-2.
Before: old baseline: worse on rung 0 (+0.0055 bits per byte, 5 pairs); multiplier × 0.969 [0.954, 0.986]. Study ladder.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class ShiftGPT(GPT):
    optimizer_groups: ClassVar = {**GPT.optimizer_groups, "shift_scales": "x0_scales"}

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.remembered |= {f"stream{layer}": shape.width for layer in range(len(self.blocks))}

    def initial_scales(self) -> dict[str, Tensor]:
        return super().initial_scales() | {"shift_scales": torch.zeros(len(self.blocks))}

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        return x_BTD + self.shift_scales[layer] * context.previous(x_BTD, f"stream{layer}")


RECIPE = replace(BASELINE, name="token_shift", make_model=ShiftGPT)
