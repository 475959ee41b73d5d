"""Several projections of one input as one product: one parameter holds their stacked matrices.

fp8.py changes how linear layers multiply. The base class here lets it find these products too, since no nn.Linear
computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn


class Merged(nn.Module):
    """multiply: (x (…, D), weight (O, D)) → x Wᵀ (…, O). A replacement of F.linear must compute the same product."""

    stacked: ClassVar[str]
    """The name of the parameter: (matrices, outputs of each, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply: Callable[[Tensor, Tensor], Tensor] = F.linear

    def stacked_weight(self) -> nn.Parameter:
        return self.get_parameter(self.stacked)

    def project(self, x: Tensor) -> Tensor:
        """x: (…, D) → (…, matrices · outputs of each), the outputs of each matrix in order."""
        return self.multiply(x, self.stacked_weight().flatten(0, 1))
