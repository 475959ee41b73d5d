"""What a model asks of the place it runs in: positions, attention, and the token before.

A model never knows whether it trains or generates; it asks the context that it is handed. `CausalContext` is
training and scoring: whole rows that start at position 0. `CachedContext` (generate/cache.py) is generation.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quern.kernels.attention import attend


class Context(Protocol):
    """Shapes: B rows, T tokens, H query heads, K key/value heads, E head dim."""

    def positions(self, x_BTD: Tensor) -> Tensor:
        """Positions (1 or B, T) of the tokens, as integers on x's device."""
        ...

    def attend(self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None) -> Tensor:
        """Causal attention → (B, T, H, E); a query sees the last `window` tokens, itself included (None: all)."""
        ...

    def previous(self, x_BTD: Tensor) -> Tensor:
        """x shifted right by one token; before the first token of all stand zeros."""
        ...


class CausalContext:
    """Whole rows from position 0: training, scoring, evaluation. Holds nothing."""

    def positions(self, x_BTD: Tensor) -> Tensor:
        return torch.arange(x_BTD.size(1), device=x_BTD.device)[None]

    def attend(self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None) -> Tensor:
        return attend(q_BTHE, k_BTKE, v_BTKE, window)

    def previous(self, x_BTD: Tensor) -> Tensor:
        return torch.nn.functional.pad(x_BTD[:, :-1], (0, 0, 1, 0))
