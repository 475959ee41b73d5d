"""SwiGLU in place of ReLU², at equal parameters.

Hypothesis: a gated feed-forward learns more per step.
Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv 2002.05202). nanochat's experiment log, 2026-02-05:
worse than ReLU² in steps, time and FLOPs, at depth 12 and 24.
Expected effect: none or worse.
Verdict: undecided on rung 0 (+0.0030 bits per byte, 8 pairs); undecided on rung 1 (-0.0045 bits per byte, 3 pairs);
better on rung 2 (-0.0055 bits per byte, 3 pairs); multiplier × 1.053 [1.044, 1.062], grows. Study ladder-2. Before: old
baseline: worse, small on rung 0 (+0.0016 bits per byte, 8 pairs); multiplier × 0.989 [0.983, 0.996]. Study ladder.

Shows the seam `GPT.make_mlp`.
"""

import math
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.gpt import GPT
from quern.model.layers import Draw
from quern.recipes.gpt import RECIPE as BASELINE


class SwiGLU(nn.Module):
    """D → 8/3 D → D with parameter names of its own, as many parameters as a plain feed-forward of 4 D."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = -(-8 * width // (3 * 16)) * 16
        self.gate = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def init_parameters(self, draw: Draw) -> None:
        bound = 0.4 * math.sqrt(3.0 / self.gate.in_features)
        draw.uniform(self.gate.weight, -bound, bound)
        draw.uniform(self.value.weight, -bound, bound)
        draw.fill(self.out.weight, 0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x_BTD)) * self.value(x_BTD))


class SwigluGPT(GPT):
    def make_mlp(self, layer: int) -> nn.Module:
        return SwiGLU(self.shape.width)


RECIPE = replace(BASELINE, name="swiglu", make_model=SwigluGPT)
