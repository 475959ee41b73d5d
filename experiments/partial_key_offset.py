"""In long layers, the channels of keys without a position are those of the token before.

Hypothesis: a query that matches a token's predecessor reads the token in one layer: one-layer induction.
Source: modded-nanogpt's pull request 169: 50 steps fewer of 2,000. As there, half of the pairs do not rotate in any
layer, and the keys are shifted after norm and rotation. It has other rates, and longer windows in its long layers.
Expected effect: better at equal steps.
Verdict: better on rung 0 (-0.1300 bits per byte, 3 pairs); undecided on rung 1 (-0.0857 bits per byte, 3 pairs);
multiplier × 1.802 [1.102, 2.665], unclear. Study ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT, CausalSelfAttention
from quern.model.unet import half_rotary_table
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class OffsetAttention(CausalSelfAttention):
    def forward(
        self,
        x_BTD: Tensor,
        value_embedding: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        window: int | Tensor | None,
        context: Context,
    ) -> Tensor:
        B, T, _ = x_BTD.shape
        q_BTHE, k_BTKE, v_BTKE = (
            project(x_BTD).view(B, T, -1, self.head_dim) for project in (self.query, self.key, self.value)
        )
        v_BTKE = self.mix_values(x_BTD, v_BTKE, value_embedding)
        q_BTHE, k_BTKE = self.rotate(q_BTHE, rotary), self.rotate(k_BTKE, rotary)
        shifted_BTKE = context.previous(k_BTKE.flatten(2), f"keys{self.layer}").view_as(k_BTKE)
        parts, shifted = k_BTKE.chunk(4, dim=-1), shifted_BTKE.chunk(4, dim=-1)
        k_BTKE = torch.cat([parts[0], shifted[1], parts[2], shifted[3]], dim=-1)  # pairs (i, i + E/2) with i ≥ E/4
        return self.project_out(x_BTD, context.attend(self.layer, q_BTHE, k_BTKE, v_BTKE, window))


class OffsetGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        long = [layer for layer, window in enumerate(self.windows) if window is None]
        self.remembered |= {f"keys{layer}": shape.kv_heads * shape.head_dim for layer in long}

    def make_attention(self, layer: int) -> CausalSelfAttention:
        self.attention_type = OffsetAttention if self.windows[layer] is None else CausalSelfAttention
        return super().make_attention(layer)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return half_rotary_table(positions, self.head_dim, base=1024.0)


RECIPE = replace(
    BASELINE, name="partial_key_offset", make_model=OffsetGPT, unused=(*BASELINE.unused, "model.rope_base")
)
