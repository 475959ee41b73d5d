"""The residual and x0 scalars start at 1 and 0, as when they were introduced.

Hypothesis: neutral initial values leave it to the model which layers use the shortcut.
Source: nanochat's experiment log, 2026-01-11. The default has nanochat's later values: 1.15 to 1.05, and 0.20 to
0.05.
Expected effect: no difference after the first hundred steps.
Verdict: undecided on rung 0 (+0.0049 bits per byte, 8 pairs); multiplier × 0.960 [0.909, 1.009]. Study ladder-2.
Before: old baseline: undecided on rung 0 (+0.0053 bits per byte, 8 pairs); multiplier × 0.970 [0.941, 0.998]. Study
ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE

OWN_INITIAL_VALUES = ("residual_scales", "x0_scales")


class NeutralScalesGPT(GPT):
    def initial_scales(self) -> dict[str, Tensor]:
        scales = super().initial_scales()
        neutral = {"residual_scales": torch.ones_like, "x0_scales": torch.zeros_like}
        return scales | {name: like(scales[name]) for name, like in neutral.items()}


RECIPE = replace(BASELINE, name="neutral_scales", make_model=NeutralScalesGPT)
