"""Ablation: the stream halfway is not subtracted at the end.

Hypothesis: the head needs what the second half adds, not what the first half prepared for attention.
Source: nanochat's experiment log, 2026-01-16: no improvement, with the tap at about 60% of the layers.
Expected effect: no difference.
Verdict: undecided on rung 0 (+0.0025 bits per byte, 8 pairs); undecided on rung 1 (+0.0021 bits per byte, 3 pairs);
multiplier × 0.980 [0.955, 1.011], unclear. Study ladder-2. Before: old baseline: undecided on rung 0 (-0.0018 bits per
byte, 3 pairs); multiplier × 1.014 [0.967, 1.064]. Study ladder-offset. Before: old baseline: no difference on rung 0
(+0.0004 bits per byte, 5 pairs); multiplier × 0.998 [0.985, 1.012]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.model.gpt import GPT
from quern.model.layers import norm
from quern.recipes.gpt import RECIPE as BASELINE


class NoBackoutGPT(GPT):
    def initial_scales(self) -> dict[str, Tensor]:
        scales = super().initial_scales()
        del scales["backout_scale"]
        return scales

    def leave(self, x_BTD: Tensor, halfway_BTD: Tensor) -> Tensor:
        return norm(x_BTD)


RECIPE = replace(BASELINE, name="no_backout", make_model=NoBackoutGPT)
