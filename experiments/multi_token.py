"""Predict the next three tokens, then two, then one.

Hypothesis: further targets teach more per step early in training.
Source: Gloeckle et al. 2024 (arXiv 2404.19737); annealed 3 → 2 → 1 as in modded-nanogpt. nanochat's experiment log,
2026-01-12, whose schedule this is: the same or slightly worse per step, noticeably worse in time, 13 GB more memory.
Expected effect: no better at equal steps, slower.
Changed: 2026-11-25T20:00, the second weight holds 0.5 for a third of the run, and the sum of the weights is 1.
Verdict: worse on rung 0 (+0.0076 bits per byte, 8 pairs); multiplier × 0.659 [0.636, 0.686]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0077 bits per byte, 3 pairs); multiplier × 0.673 [0.663, 0.684]. Study ladder.

Shows the seam `LanguageModel.loss`; evaluation stays the loss of the next token.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


def weights(progress: float) -> list[float]:
    """Weights of the losses on the next token and on the two further ones; their sum is 1.

    The third falls from 0.25 to 0 over the first third of the run. The second is 0.5 until then, and 0 at two thirds.
    """
    found = [1.0, 0.5 * min(1.0, max(0.0, 2 - 3 * progress)), 0.25 * max(0.0, 1 - 3 * progress)]
    return [weight / sum(found) for weight in found]


class MultiTokenGPT(GPT):
    def loss(
        self, x_BTD: Tensor, targets_BT: Tensor, scale_BT: Tensor, context: CausalContext
    ) -> tuple[Tensor, Tensor]:
        first, *others = weights(context.progress) if torch.is_grad_enabled() else [1.0]
        total, losses_BT = super().loss(x_BTD, targets_BT, first * scale_BT, context)
        for further, weight in enumerate(others, start=1):
            if weight > 0:
                further_scale_BT = weight * scale_BT.roll(-further, 1)
                further_scale_BT[:, -further:] = 0  # the end of a row has no target so far ahead
                total = total + super().loss(x_BTD, targets_BT.roll(-further, 1), further_scale_BT, context)[0]
        return total, losses_BT


RECIPE = replace(BASELINE, name="multi_token", make_model=MultiTokenGPT)
