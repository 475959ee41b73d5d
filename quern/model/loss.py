"""The one loss: a sum over valid targets divided by the global number of valid targets.

Pretraining, SFT and RL differ in their batches only: `mask` says which targets count, `weight` carries advantages.
The number of valid targets is the whole batch's, over all micro-batches and ranks, so that accumulation and
parallelism cannot change the update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quern.kernels.cross_entropy import cross_entropy
from quern.machine import Attention
from quern.model.fp8 import head_products
from quern.model.interface import LanguageModel


def loss_sum(
    model: LanguageModel,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    scale_BT: Tensor,
    window: float = 1.0,
    attention: Attention | None = None,
) -> tuple[Tensor, Tensor]:
    """→ (sum of scale · nats as a differentiable scalar, nats per token (B, T)).

    scale: (B, T) fp32, mask · weight / number of valid targets in the global batch. window: how far growing windows
    have come, of 1. attention: how it is computed (`Machine.attention`).
    """
    x_BTD = model(tokens_BT, model.context(tokens_BT, window).with_backend(attention, tokens_BT, model.windows))
    total, losses = _criterion(model)(
        x_BTD.flatten(0, 1),
        model.head.weight,
        targets_BT.flatten(),
        scale_BT.flatten(),
        model.cap,
        head_products(model.head),
    )
    return total, losses.view(targets_BT.shape)


def token_losses(model: LanguageModel, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Nats of each target (B, T) in fp32, from hidden states, without holding full logits. Not differentiable."""
    with torch.no_grad():
        zeros = torch.zeros(targets_BT.numel(), dtype=torch.float32, device=x_BTD.device)
        _, losses = _criterion(model)(x_BTD.flatten(0, 1), model.head.weight, targets_BT.flatten(), zeros, model.cap)
    return losses.view(targets_BT.shape)


def _criterion(model: LanguageModel) -> Callable[..., tuple[Tensor, Tensor]]:
    """A model whose head holds a part of the vocabulary brings its own `cross_entropy` (parallel/)."""
    return getattr(model, "criterion", cross_entropy)
