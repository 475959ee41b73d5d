"""Draws initial values: each parameter has its own generator. The modules choose the distributions."""

from __future__ import annotations

import hashlib
from typing import cast

import torch
from torch import Tensor, nn


class Draw:
    """Sets the initial values of a model's parameters, each from a generator of its own.

    The generator of a parameter is seeded by (seed, name), so a parameter that an idea adds leaves the initial values
    of all others unchanged.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._names = {p: name for name, p in model.named_parameters()}
        self.filled: set[str] = set()

    def uniform(self, p: Tensor, low: float, high: float) -> None:
        """Uniform on [low, high)."""
        self.fill(p, torch.empty(p.shape, dtype=torch.float32, device="cpu").uniform_(low, high, generator=self._of(p)))

    def normal(self, p: Tensor, std: float) -> None:
        """Normal with mean 0 and standard deviation `std`."""
        self.fill(p, torch.empty(p.shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=self._of(p)))

    def fill(self, p: Tensor, value: float | Tensor) -> None:
        """A constant, or given values."""
        p.copy_(torch.as_tensor(value).expand(p.shape))
        self.filled.add(self._names[cast(nn.Parameter, p)])

    def _of(self, p: Tensor) -> torch.Generator:
        name = self._names[cast(nn.Parameter, p)]
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))  # a CPU generator reads 32 bits
