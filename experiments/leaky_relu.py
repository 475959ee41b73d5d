"""LeakyReLU² in place of ReLU²: negative inputs count half before the square.

Hypothesis: no unit is ever dead.
Source: parameter-golf. nanochat's experiment log, 2026-03-24: slightly better per step, slightly slower, worse in
time.
Expected effect: slightly better at equal steps.
Verdict: undecided on rung 0 (-0.0018 bits per byte, 8 pairs); better on rung 1 (-0.0059 bits per byte, 5 pairs);
undecided on rung 2 (-0.0065 bits per byte, 3 pairs); multiplier × 1.069 [1.048, 1.090], grows. Study ladder-2. Before:
old baseline: no difference on rung 0 (-0.0011 bits per byte, 5 pairs); multiplier × 1.006 [0.997, 1.016]. Study ladder.
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from quern.model.gpt import GPT
from quern.model.layers import SquaredReluMLP
from quern.recipes.gpt import RECIPE as BASELINE


class LeakyMLP(SquaredReluMLP):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.leaky_relu(self.up(x_BTD), 0.5).square())


class LeakyGPT(GPT):
    mlp_type = LeakyMLP


RECIPE = replace(BASELINE, name="leaky_relu", make_model=LeakyGPT)
