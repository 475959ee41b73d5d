"""Predict the next three tokens, then two, then one.

Hypothesis: further targets teach more per step early in training.
Source: Gloeckle et al. 2024 (arXiv 2404.19737); annealed 3 → 2 → 1 as in modded-nanogpt. nanochat's experiment log,
2026-01-12: the same or slightly worse per step, noticeably worse in time, 13 GB more memory. Its weights are
normalised to a sum of 1; here the further losses come on top.
Expected effect: no better at equal steps, slower.
Verdict: worse at equal steps (+0.0829 bits per byte, 7 pairs); worse at equal flops (+0.0829 bits per byte, 7 pairs);
worse at equal seconds (+0.1733 bits per byte, 7 pairs). Study stream.

Shows the seam `LanguageModel.loss`; evaluation stays the loss of the next token.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE

WEIGHTS = (0.5, 0.25)
"""Weight, at the start, of the loss on the second and on the third token ahead."""


class MultiTokenGPT(GPT):
    def loss(
        self, x_BTD: Tensor, targets_BT: Tensor, scale_BT: Tensor, context: CausalContext
    ) -> tuple[Tensor, Tensor]:
        total, losses_BT = super().loss(x_BTD, targets_BT, scale_BT, context)
        if not torch.is_grad_enabled():
            return total, losses_BT
        for further, weight in enumerate(WEIGHTS, start=1):
            ends = 1 - further / (len(WEIGHTS) + 1)  # the third token until 1/3 of the run, the second until 2/3
            weight *= max(0.0, 1 - context.progress / ends)
            if weight > 0:
                further_scale_BT = weight * scale_BT.roll(-further, 1)
                further_scale_BT[:, -further:] = 0  # the end of a row has no target so far ahead
                total = total + super().loss(x_BTD, targets_BT.roll(-further, 1), further_scale_BT, context)[0]
        return total, losses_BT


RECIPE = replace(BASELINE, name="multi_token", make_model=MultiTokenGPT)
