"""The context that a model runs in: positions, attention, and the token before.

A model never knows whether it trains or generates; it asks the context that it is handed. `CausalContext` is
training and scoring: whole rows that start at position 0. generate/cache.py has the contexts of generation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quern.kernels.attention.attend import MaskSpec, attend
from quern.machine import Attention

Window = int | Tensor | None
"""The tokens that a query sees, itself included; None is all of them. A 0-dim CPU tensor may change between calls."""


class Context(Protocol):
    """Shapes: B rows, T tokens, H query heads, K key/value heads, E head dim."""

    continues: bool
    """Whether rows may go on after earlier tokens, so that a token before a row's first one exists."""

    def positions(self, x_BTD: Tensor) -> Tensor:
        """Positions (1 or B, T) of the tokens, as integers on x's device."""
        ...

    def windows(self, full: Sequence[int | None]) -> Sequence[Window]:
        """The tokens that a query of each layer sees now, at most `full`: windows may grow in training."""
        ...

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: Window, scale: float | None = None
    ) -> Tensor:
        """Causal attention → (B, T, H, E); a query sees the last `window` tokens, itself included (None: all).

        window: a 0-dim CPU tensor where it changes between calls (`MaskSpec`). scale None is 1/sqrt(E).
        """
        ...

    def previous(self, x_BTD: Tensor, name: str) -> Tensor:
        """x shifted right by one token; zeros before the first token. name: a key of the model's `remembered`."""
        ...

    def previous_tokens(self, tokens_BT: Tensor, n: int) -> Tensor:
        """The ids (B, T) that are n tokens before each token; -1 before the first token. n ≤ the model's `lookback`."""
        ...


class CausalContext:
    """Whole rows from position 0: training, scoring, evaluation.

    documents_BT: int32 ids, non-decreasing along T; attention does not cross from one document into the next.
    windows: for each layer, in place of the model's own; as 0-dim CPU tensors they may change between calls. progress:
    share of the training run that is done; 1 in evaluation.
    """

    continues = False

    def __init__(
        self, documents_BT: Tensor | None = None, windows: Sequence[Window] | None = None, progress: float = 1.0
    ) -> None:
        self.documents_BT = documents_BT
        self.progress = progress
        self._windows = windows
        self._attend: Callable[..., Tensor] = attend

    def with_backend(self, attention: Attention | None) -> CausalContext:
        """This context, with attention computed so (None: by the path that runs everywhere)."""
        if attention is None:
            return self
        through = copy.copy(self)
        through._attend = attention.attend
        return through

    def positions(self, x_BTD: Tensor) -> Tensor:
        return torch.arange(x_BTD.size(1), device=x_BTD.device)[None]

    def windows(self, full: Sequence[int | None]) -> Sequence[Window]:
        return full if self._windows is None else self._windows

    def attend(
        self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: Window, scale: float | None = None
    ) -> Tensor:
        return self._attend(q_BTHE, k_BTKE, v_BTKE, MaskSpec(window, self.documents_BT), scale)

    def previous(self, x_BTD: Tensor, name: str) -> Tensor:
        return torch.nn.functional.pad(x_BTD[:, :-1], (0, 0, 1, 0))

    def previous_tokens(self, tokens_BT: Tensor, n: int) -> Tensor:
        return torch.nn.functional.pad(tokens_BT, (n, 0), value=-1)[:, : tokens_BT.size(1)]
