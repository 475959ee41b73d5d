"""Queries, keys, values and output are one matrix, which Muon orthogonalises as a whole.

Hypothesis: one large matrix is faster, and its update spreads over the four parts.
Source: nanochat's experiment log, 2026-01-18: fused into one linear layer, almost no effect. The output's part is
stored transposed.
Expected effect: no difference.
Verdict: worse on rung 0 (+0.0225 bits per byte, 3 pairs); multiplier × 0.831 [0.776, 0.889]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0176 bits per byte, 3 pairs); multiplier × 0.909 [0.892, 0.927]. Study ladder.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.model.context import Context
from quern.model.gpt import GPT, CausalSelfAttention
from quern.model.layers import Draw
from quern.recipes.gpt import RECIPE as BASELINE


class FusedAttention(CausalSelfAttention):
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, *, layer: int, gated: bool) -> None:
        super().__init__(width, heads, kv_heads, head_dim, layer=layer, gated=gated)
        del self.query, self.key, self.value, self.out
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.qkvo = nn.Parameter(torch.empty(sum(self.sizes) + heads * head_dim, width))

    def init_parameters(self, draw: Draw) -> None:
        bound = math.sqrt(3.0 / self.qkvo.size(1))
        draw.uniform(self.qkvo, -bound, bound)
        draw.fill(self.qkvo, torch.cat([self.qkvo[: sum(self.sizes)], 0 * self.qkvo[sum(self.sizes) :]]))
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
        qkv = F.linear(x_BTD, self.qkvo[: sum(self.sizes)]).unflatten(-1, (-1, self.head_dim))
        q_BTHE, k_BTKE, v_BTKE = qkv.split([size // self.head_dim for size in self.sizes], dim=2)
        v_BTKE = self.mix_values(x_BTD, v_BTKE, value_embedding)
        q_BTHE, k_BTKE = self.rotate(q_BTHE, rotary), self.keys(self.rotate(k_BTKE, rotary), context)
        y_BTHE = context.attend(self.layer, q_BTHE, k_BTKE, v_BTKE, window)
        return y_BTHE.flatten(2) @ self.qkvo[sum(self.sizes) :]


class FusedGPT(GPT):
    attention_type = FusedAttention


RECIPE = replace(BASELINE, name="fused_qkvo", make_model=FusedGPT)
