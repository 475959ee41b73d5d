"""The small pieces that every model is made of: norm, rotary positions, feed-forward, token shift.

Shapes: B batch, T tokens, D width, H heads, E head dim. Pure functions and single-device modules.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.kernels.embedding import embed
from quern.kernels.rope import rotary_angles
from quern.model.initialize import Draw


def norm(x: Tensor) -> Tensor:
    """RMSNorm without parameters over the last dim (arXiv 1910.07467); computed in fp32, returned in x's dtype."""
    return F.rms_norm(x.float(), (x.size(-1),), eps=1e-6).to(x.dtype)


def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `rotary_angles` at the frequencies base^(-2i / head_dim), for (1 or B, T) positions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    return rotary_angles(positions, base**-exponents)


class Embedding(nn.Embedding):
    """tokens (B, T) → rows of its weight (B, T, D)."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # there a draw of normal numbers has no effect, and imports PyTorch's compiler
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return embed(input, self.weight)


class SquaredReluMLP(nn.Module):
    """D → 4D → D with ReLU² in between (Primer, arXiv 2109.08668).

    up_share: the first matrix starts uniform with this share of the deviation 1/sqrt(width); the second at zero.
    """

    def __init__(self, width: int, up_share: float) -> None:
        super().__init__()
        self.up_share = up_share
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def init_parameters(self, draw: Draw) -> None:
        bound = self.up_share * math.sqrt(3.0 / self.up.in_features)
        draw.uniform(self.up.weight, -bound, bound)
        draw.fill(self.down.weight, 0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BTD)).square())
