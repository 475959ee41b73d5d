"""XSA: in the deepest layers, attention's output has no part along the token's own value.

Hypothesis: a token knows its own value already; attention should bring what others know.
Source: nanochat's experiment log, 2026-03-24 (from parameter-golf), in the deepest three layers without value
embedding: slightly better per step, not in time. Here: the deepest quarter of the layers, those with value
embeddings left out.
Expected effect: slightly better at equal steps.
Verdict: no difference on rung 0 (+0.0010 bits per byte, 8 pairs); multiplier × 0.982 [0.965, 1.001]. Study ladder-2.
Before: old baseline: undecided on rung 0 (+0.0023 bits per byte, 5 pairs); multiplier × 0.977 [0.968, 0.987]. Study
ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.model.gpt import GPT, CausalSelfAttention
from quern.recipes.gpt import RECIPE as BASELINE


class ExclusiveAttention(CausalSelfAttention):
    def project_out(self, x_BTD: Tensor, y_BTHE: Tensor) -> Tensor:
        v_BTKE = self.value(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTHE = v_BTKE.repeat_interleave(y_BTHE.size(2) // v_BTKE.size(2), dim=2)
        along = (y_BTHE * v_BTHE).sum(-1, keepdim=True) / (v_BTHE.square().sum(-1, keepdim=True) + 1e-6)
        return super().project_out(x_BTD, y_BTHE - along * v_BTHE)


class ExclusiveGPT(GPT):
    def make_attention(self, layer: int) -> CausalSelfAttention:
        deep = layer >= self.shape.depth - max(2, self.shape.depth // 4)
        self.attention_type = (
            ExclusiveAttention if deep and not self.has_value_embedding(layer) else CausalSelfAttention
        )
        return super().make_attention(layer)


RECIPE = replace(BASELINE, name="exclusive_attention", make_model=ExclusiveGPT)
