"""Several projections of the same input as one product: their matrices stand stacked in one parameter.

A base class for the modules that hold such a parameter, so that whoever changes how linear layers multiply (fp8.py)
finds these products too, which no nn.Linear computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn


class Merged(nn.Module):
    """multiply: (x (…, D), weight (O, D)) → x Wᵀ (…, O); what stands in for F.linear must mean the same."""

    stacked: ClassVar[str]
    """The name of the parameter: (matrices, outputs of each, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply: Callable[[Tensor, Tensor], Tensor] = F.linear

    def stacked_weight(self) -> nn.Parameter:
        return self.get_parameter(self.stacked)

    def project(self, x: Tensor) -> Tensor:
        """x: (…, D) → (…, matrices · outputs of each), one matrix's outputs after the other's."""
        return self.multiply(x, self.stacked_weight().flatten(0, 1))
