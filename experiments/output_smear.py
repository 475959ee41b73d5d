"""The last hidden state of the token before is mixed into that of each token.

Hypothesis: what the token before predicted for two tokens ahead helps now; a form of multi-token prediction.
Source: modded-nanogpt's pull request 151 (Smear-MTP): 15 steps fewer of 5,550. The factor starts at 0; hidden states
are not normed again.
Expected effect: slightly better at equal steps.
Verdict: better, small on rung 0 (-0.0039 bits per byte, 8 pairs); multiplier × 1.033 [1.015, 1.053]. Study ladder-2.
Before: old baseline: better, small on rung 0 (-0.0027 bits per byte, 8 pairs); multiplier × 1.015 [1.004, 1.028]. Study
ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class OutputSmearGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.remembered |= {"output": shape.width}

    def initial_scales(self) -> dict[str, Tensor]:
        return super().initial_scales() | {"output_smear": torch.zeros(1)}

    def forward(self, tokens_BT: Tensor, context: Context) -> Tensor:
        x_BTD = super().forward(tokens_BT, context)
        return x_BTD + self.output_smear * context.previous(x_BTD, "output")


RECIPE = replace(BASELINE, name="output_smear", make_model=OutputSmearGPT)
