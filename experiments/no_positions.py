"""Ablation: queries and keys do not know their positions.

Hypothesis: without positions attention cannot tell the last token from one long ago.
Source: Haviv et al. 2022 (arXiv 2203.16634): without any positions a causal model is somewhat worse.
Expected effect: worse.
Verdict: worse on rung 0 (+0.0606 bits per byte, 3 pairs); worse on rung 1 (+0.0811 bits per byte, 3 pairs); multiplier
× 0.479 [0.463, 0.495], fades. Study ladder-2. Before: old baseline: worse on rung 0 (+0.0587 bits per byte, 3 pairs);
multiplier × 0.626 [0.598, 0.661]. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.0661 bits per byte, 5
pairs); multiplier × 0.691 [0.680, 0.705]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class NoPositionsGPT(GPT):
    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotary(positions * 0)


RECIPE = replace(BASELINE, name="no_positions", make_model=NoPositionsGPT, unused=(*BASELINE.unused, "model.rope_base"))
