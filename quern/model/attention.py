"""Causal self-attention with grouped queries, QK norm, rotary positions and gated value embeddings.

How the attention itself is computed (whole rows, cached, sharded) is the context's business.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from quern.kernels.rope import rotate_normed
from quern.model.context import Context
from quern.model.initialize import Draw

QK_SCALE = 1.2
"""Both normed queries and keys are scaled up by this, which sharpens attention (nanochat)."""
GATE_CHANNELS = 12
"""Leading channels of the residual stream that the value embedding's gate looks at."""
GATE_RANGE = 3.0


class CausalSelfAttention(nn.Module):
    """Reads its head counts off the projections' shapes, so that the same code runs on a shard of the heads."""

    optimizer_groups: ClassVar = {"value_gate": "gates"}
    qk_scale: ClassVar[float] = QK_SCALE
    gate_channels: ClassVar[int] = GATE_CHANNELS
    gate_range: ClassVar[float] = GATE_RANGE

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, *, layer: int, gated: bool) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.value_gate = nn.Linear(self.gate_channels, kv_heads, bias=False) if gated else None

    def init_parameters(self, draw: Draw) -> None:
        """Initialises as nanochat: the output is zero, the other projections uniform with deviation 1/sqrt(width)."""
        bound = math.sqrt(3.0 / self.query.in_features)
        for linear in (self.query, self.key, self.value):
            draw.uniform(linear.weight, -bound, bound)
        draw.fill(self.out.weight, 0.0)
        if self.value_gate is not None:
            draw.uniform(self.value_gate.weight, 0.0, 0.02)

    def forward(
        self,
        x_BTD: Tensor,
        value_embedding: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        window: int | Tensor | None,
        context: Context,
    ) -> Tensor:
        """x: (B, T, D), normed; value_embedding: (B, T, K·E) or None → (B, T, D)."""
        B, T, _ = x_BTD.shape
        q_BTHE = self.query(x_BTD).view(B, T, -1, self.head_dim)
        k_BTKE = self.key(x_BTD).view(B, T, -1, self.head_dim)
        v_BTKE = self.value(x_BTD).view(B, T, -1, self.head_dim)
        v_BTKE = self.mix_values(x_BTD, v_BTKE, value_embedding)
        q_BTHE, k_BTKE = self.rotate(q_BTHE, rotary), self.rotate(k_BTKE, rotary)
        return self.project_out(x_BTD, context.attend(self.layer, q_BTHE, k_BTKE, v_BTKE, window))

    def mix_values(self, x_BTD: Tensor, v_BTKE: Tensor, value_embedding: Tensor | None) -> Tensor:
        """The values that are attended to: value residual learning (arXiv 2410.17897) from an embedding of the token,
        gated by the input per head."""
        if self.value_gate is None or value_embedding is None:
            return v_BTKE
        gate_BTK = self.gate_range * torch.sigmoid(self.value_gate(x_BTD[..., : self.gate_channels]))
        return v_BTKE + gate_BTK[..., None] * value_embedding.view_as(v_BTKE)

    def rotate(self, x_BTHE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Normed and rotated queries or keys. QK norm: arXiv 2010.04245."""
        return rotate_normed(x_BTHE, *rotary, self.qk_scale)

    def project_out(self, x_BTD: Tensor, y_BTHE: Tensor) -> Tensor:
        """The output (B, T, D) from the input of the layer and the heads' attention."""
        return self.out(y_BTHE.flatten(2))
