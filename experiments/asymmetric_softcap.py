"""The cap of modded-nanogpt: 23 · sigmoid((z + 5) / 7.5).

Hypothesis: logits need more room above zero than below it.
Source: nanochat's experiment log, 2026-01-16: slightly worse; it may help with FP8 only. The loss has no kernel for
this cap, so it runs through whole logits: slower, and with more memory.
Expected effect: slightly worse; compare at equal steps.
Verdict: worse on rung 0 (+0.0181 bits per byte, 3 pairs); multiplier × 0.859 [0.829, 0.889]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0164 bits per byte, 3 pairs); multiplier × 0.911 [0.896, 0.928]. Study ladder.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


def asymmetric_cap(logits: Tensor) -> Tensor:
    return 23 * torch.sigmoid((logits + 5) / 7.5)


class AsymmetricCapGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.cap = asymmetric_cap


RECIPE = replace(
    BASELINE, name="asymmetric_softcap", make_model=AsymmetricCapGPT, unused=(*BASELINE.unused, "model.softcap")
)
