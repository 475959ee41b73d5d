"""The one loss: a sum over valid targets divided by the global number of valid targets.

Pretraining, SFT and RL differ in their batches only: `mask` says which targets count, `weight` carries advantages.
The number of valid targets is the whole batch's, over all micro-batches and ranks, so that accumulation and
parallelism cannot change the update. A model's own loss is `LanguageModel.loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quern.machine import Attention
from quern.model.base import LanguageModel
from quern.model.context import CausalContext


def loss_sum(
    model: LanguageModel,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    scale_BT: Tensor,
    progress: float = 1.0,
    attention: Attention | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the model on whole rows and computes its loss.

    Args:
        model: The model.
        tokens_BT: (B, T) int64.
        targets_BT: (B, T) int64.
        scale_BT: (B, T) fp32, mask · weight / number of valid targets in the global batch.
        progress: Share of the training run that is done.
        attention: How attention is computed (`Machine.attention`).

    Returns:
        Σ scale · nats as a differentiable scalar, and the nats of each token (B, T).
    """
    context = model.context(tokens_BT, progress).with_backend(attention, tokens_BT, model.windows)
    return model.loss(model(tokens_BT, context), targets_BT, scale_BT, context)


@torch.no_grad()
def token_losses(
    model: LanguageModel, x_BTD: Tensor, targets_BT: Tensor, context: CausalContext | None = None
) -> Tensor:
    """Nats of each target (B, T) in fp32 from hidden states, without holding full logits. Not differentiable."""
    zeros = torch.zeros(targets_BT.shape, dtype=torch.float32, device=targets_BT.device)
    return model.loss(x_BTD, targets_BT, zeros, context or CausalContext())[1]
