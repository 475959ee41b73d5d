"""A mixture of experts: each token passes through two of four feed-forwards, each half as wide.

Hypothesis: more parameters at equal active ones learn more per step.
Source: Shazeer et al. 2017 (arXiv 1701.06538); the sigmoid gate of DeepSeek-V3 (arXiv 2412.19437), without its
balancing bias.
Expected effect: slightly better at equal steps. Worse at equal FLOPs here: all four experts are computed for every
token and the gate takes two, which at these sizes is quicker than sorting tokens by expert.
Verdict: better on rung 0 (-0.0105 bits per byte, 3 pairs); better on rung 1 (-0.0215 bits per byte, 3 pairs);
multiplier × 0.840 [0.817, 0.865], unclear. Study ladder-2. Before: old baseline: better on rung 0 (-0.0057 bits per
byte, 5 pairs); multiplier × 0.765 [0.755, 0.776]. Study ladder.
"""

import math
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.gpt import GPT, UP_SHARE
from quern.model.layers import Draw
from quern.recipes.gpt import RECIPE as BASELINE

EXPERTS, CHOSEN = 4, 2


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width // CHOSEN, bias=False)
        self.down = nn.Linear(4 * width // CHOSEN, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BTD)).square())


class Experts(nn.Module):
    """x → Σ over the chosen experts of gate · expert(x). The gates of a token sum to CHOSEN."""

    optimizer_groups: ClassVar = {"router": "gates"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(EXPERTS))

    def init_parameters(self, draw: Draw) -> None:
        bound = math.sqrt(3.0 / self.router.in_features)
        draw.uniform(self.router.weight, -bound, bound)
        for expert in self.experts:
            assert isinstance(expert, Expert)
            draw.uniform(expert.up.weight, -UP_SHARE * bound, UP_SHARE * bound)
            draw.fill(expert.down.weight, 0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        score_BTX = torch.sigmoid(self.router(x_BTD))
        least_BT1 = score_BTX.topk(CHOSEN, dim=-1).values[..., -1:]
        gate_BTX = score_BTX * (score_BTX >= least_BT1)
        gate_BTX = CHOSEN * gate_BTX / gate_BTX.sum(-1, keepdim=True)
        parts = [gate * expert(x_BTD) for gate, expert in zip(gate_BTX.split(1, -1), self.experts, strict=True)]
        return torch.stack(parts).sum(0)


class MoeGPT(GPT):
    def make_mlp(self, layer: int) -> nn.Module:
        return Experts(self.shape.width)


RECIPE = replace(BASELINE, name="moe", make_model=MoeGPT)
