"""Only a quarter of each head's pairs rotate.

Hypothesis: few channels with a position are enough.
Source: Partial RoPE from parameter-golf. nanochat's experiment log, 2026-03-24: slightly worse.
Expected effect: slightly worse.
Verdict: worse on rung 0 (+0.0060 bits per byte, 8 pairs); multiplier × 0.950 [0.931, 0.970]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0104 bits per byte, 5 pairs); multiplier × 0.943 [0.921, 0.966]. Study ladder.

The head dim must be at least 8.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.kernels.rope import rotary_angles
from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class QuarterRopeGPT(GPT):
    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = self.head_dim // 2
        turning = torch.arange(pairs // 4, dtype=torch.float32, device=positions.device) / (pairs // 4)
        return rotary_angles(positions, F.pad(self.shape.rope_base**-turning, (0, pairs - pairs // 4)))


RECIPE = replace(BASELINE, name="quarter_rope", make_model=QuarterRopeGPT)
