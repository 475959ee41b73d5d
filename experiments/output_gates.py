"""A gate for each head on the output of attention.

Hypothesis: a head that found nothing can switch itself off, without an attention sink.
Source: modded-nanogpt's sparse attention gate; Qiu et al. 2025 (arXiv 2505.06708). nanochat's experiment log,
2026-01-17: no improvement, 1 GB more memory.
Expected effect: no difference at equal steps.
Verdict: better, small on rung 0 (-0.0036 bits per byte, 8 pairs); better on rung 1 (-0.0078 bits per byte, 5 pairs);
better on rung 2 (-0.0092 bits per byte, 3 pairs); multiplier × 1.098 [1.077, 1.118], grows. Study ladder-2. Before: old
baseline: better, small on rung 0 (-0.0045 bits per byte, 5 pairs); multiplier × 1.026 [1.013, 1.039]. Study ladder.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from quern.model.gpt import GPT, CausalSelfAttention
from quern.model.layers import Draw
from quern.recipes.gpt import RECIPE as BASELINE


class GatedAttention(CausalSelfAttention):
    optimizer_groups: ClassVar = {**CausalSelfAttention.optimizer_groups, "output_gate": "gates"}

    def __init__(self, width: int, heads: int, *sizes: int, layer: int, gated: bool) -> None:
        super().__init__(width, heads, *sizes, layer=layer, gated=gated)
        self.output_gate = nn.Linear(self.gate_channels, heads, bias=False)

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.fill(self.output_gate.weight, 0.0)

    def project_out(self, x_BTD: Tensor, y_BTHE: Tensor) -> Tensor:
        """Gates start at 1, not at one half as in the source, so that the first step is the baseline's."""
        gate_BTH = 2 * torch.sigmoid(self.output_gate(x_BTD[..., : self.gate_channels]))
        return super().project_out(x_BTD, gate_BTH[..., None] * y_BTHE)


class GatedGPT(GPT):
    attention_type = GatedAttention


RECIPE = replace(BASELINE, name="output_gates", make_model=GatedGPT)
