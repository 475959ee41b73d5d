"""Ablation: queries and keys are not normed.

Hypothesis: without the norm, logits of the attention grow during training and training gets unstable.
Source: QK norm: Henry et al. 2020 (arXiv 2010.04245); in the walkthrough of modded-nanogpt and in nanochat from the
start.
Expected effect: worse, above all at high rates.
Verdict: worse on rung 0 (+0.1811 bits per byte, 3 pairs); multiplier × 0.233 [0.220, 0.251]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0745 bits per byte, 3 pairs); multiplier × 0.660 [0.648, 0.674]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.kernels.rope import rotate
from quern.model.gpt import GPT, CausalSelfAttention
from quern.recipes.gpt import RECIPE as BASELINE


class UnnormedAttention(CausalSelfAttention):
    def rotate(self, x_BTHE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(x_BTHE, *rotary)


class UnnormedGPT(GPT):
    attention_type = UnnormedAttention


RECIPE = replace(BASELINE, name="no_qk_norm", make_model=UnnormedGPT)
