"""Attention windows that start short and grow.

Hypothesis: short windows make early steps cheaper without a loss in the end.
Source: modded-nanogpt grows its windows over the run.
Expected effect: less time to the same loss.
Verdict: no difference on rung 0 (+0.0015 bits per byte, 8 pairs); multiplier × 0.992 [0.973, 1.013]. Study ladder-2.
Before: old baseline: no difference on rung 0 (-0.0002 bits per byte, 5 pairs); multiplier × 1.006 [0.993, 1.019]. Study
ladder.

Shows the seam `context` in `gpt`: windows are tensors, so a compiled model compiles once.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE

BLOCK = 64


class GrowingWindowsGPT(GPT):
    def context(self, tokens_BT: Tensor, progress: float = 1.0) -> CausalContext:
        """Every layer's window grows in blocks from one block to its full size, which it has before the end."""
        full = [size or self.shape.context for size in self.windows]
        now = {size: min(size, BLOCK * max(1, math.ceil(progress * 1.25 * size / BLOCK))) for size in set(full)}
        tensors = {size: torch.tensor(window) for size, window in now.items()}
        return CausalContext(windows=[tensors[size] for size in full], progress=progress)


RECIPE = replace(BASELINE, name="growing_windows", make_model=GrowingWindowsGPT)
