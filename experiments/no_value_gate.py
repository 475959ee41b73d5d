"""Ablation: value embeddings are added without a gate.

Hypothesis: the gate, which the input opens for each head, uses the value embedding only where it helps.
Source: nanochat's experiment log, 2026-01-17: the gate helps. Here the embedding is added with factor 1; the gate of
the default starts at 1.5.
Expected effect: slightly worse.
Verdict: worse on rung 0 (+0.0052 bits per byte, 6 pairs); multiplier × 0.957 [0.931, 0.982]. Study ladder-2. Before:
old baseline: worse, small on rung 0 (+0.0046 bits per byte, 5 pairs); multiplier × 0.974 [0.962, 0.986]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.model.gpt import GPT, CausalSelfAttention
from quern.recipes.gpt import RECIPE as BASELINE


class UngatedAttention(CausalSelfAttention):
    def __init__(self, *sizes: int, layer: int, gated: bool) -> None:
        super().__init__(*sizes, layer=layer, gated=False)

    def mix_values(self, x_BTD: Tensor, v_BTKE: Tensor, value_embedding: Tensor | None) -> Tensor:
        return v_BTKE if value_embedding is None else v_BTKE + value_embedding.view_as(v_BTKE)


class UngatedGPT(GPT):
    attention_type = UngatedAttention


RECIPE = replace(BASELINE, name="no_value_gate", make_model=UngatedGPT, unused=(*BASELINE.unused, "optim.gate_lr"))
