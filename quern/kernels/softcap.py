"""Caps of the logits before the softmax, as small callable values.

A cap maps fp32 logits to fp32 logits, elementwise. Since top · σ(z / b) = top/2 + top/2 · tanh(z / 2b), and a softmax
ignores constants, both bounded caps are height · tanh(z / divisor) to a loss kernel: their `tanh_form`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor


@dataclass(frozen=True)
class TanhCap:
    """limit · tanh(z / limit): the identity near zero, never beyond ± limit (Gemma 2, arXiv 2408.00118)."""

    limit: float

    def __call__(self, logits: Tensor) -> Tensor:
        return self.limit * torch.tanh(logits / self.limit)

    @property
    def tanh_form(self) -> tuple[float, float]:
        return self.limit, self.limit


@dataclass(frozen=True)
class SigmoidCap:
    """top · σ(z / divisor): between 0 and top (modded-nanogpt: 30 and 7.5 · sqrt(width))."""

    top: float
    divisor: float

    def __call__(self, logits: Tensor) -> Tensor:
        return self.top * torch.sigmoid(logits / self.divisor)

    @property
    def tanh_form(self) -> tuple[float, float]:
        return self.top / 2, 2 * self.divisor


@dataclass(frozen=True)
class NoCap:
    """Logits as they are, without a bound."""

    tanh_form = None

    def __call__(self, logits: Tensor) -> Tensor:
        return logits


Cap = TanhCap | SigmoidCap | NoCap | Callable[[Tensor], Tensor]
"""Any function of fp32 logits; the loss kernel knows the three above (`has_kernel`)."""


def has_kernel(cap: Cap) -> TypeGuard[TanhCap | SigmoidCap | NoCap]:
    """Whether the fused loss computes this cap. A subclass may do something else, so it counts as unknown."""
    return type(cap) in (TanhCap, SigmoidCap, NoCap)
