"""ReLU² is capped: 100 · tanh(x / 100).

Hypothesis: bounded activations have no outliers, which low precision cannot represent.
Source: Kimi K3. nanochat's experiment log, 2026-08-02: slightly worse.
Expected effect: no difference, or slightly worse.
Verdict: no difference on rung 0 (-0.0009 bits per byte, 8 pairs); multiplier × 1.008 [0.990, 1.025]. Study ladder-2.
Before: old baseline: no difference on rung 0 (-0.0001 bits per byte, 5 pairs); multiplier × 1.001 [0.989, 1.012]. Study
ladder.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.model.gpt import GPT
from quern.model.layers import SquaredReluMLP
from quern.recipes.gpt import RECIPE as BASELINE

CAP = 100.0


class CappedMLP(SquaredReluMLP):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(CAP * torch.tanh(F.relu(self.up(x_BTD)).square() / CAP))


class CappedGPT(GPT):
    mlp_type = CappedMLP


RECIPE = replace(BASELINE, name="capped_relu", make_model=CappedGPT)
