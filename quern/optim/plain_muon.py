"""Muon as first published: Nesterov momentum, one fixed quintic, a step; without the additions of muon.py.

No weight decay, no second moment, no normalised rows. A rule on stacks (N, R, C) as in muon.py. Source: Jordan et al.
2024 (kellerjordan.github.io/posts/muon); `torch.optim.Muon` is the oracle of its test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quern.optim.adamw import Scalars, State
from quern.optim.muon import nesterov_, newton_schulz


@dataclass(frozen=True)
class PlainMuon:
    """The rule of a parameter group (see `groups.Rule`). steps: iterations of the orthogonalisation."""

    steps: int = 5

    stacked: ClassVar[bool] = True

    def init_state(self, master: Tensor) -> State:
        return {"momentum": torch.zeros_like(master)}

    def scalars(self, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        return {"lr": lr, "momentum": momentum}

    def update_(
        self, master: Tensor, grad: Tensor, state: State, scalars: Scalars, *, dtype: torch.dtype, out: Tensor | None
    ) -> None:
        """The rate is scaled by sqrt(max(1, R/C)): tall matrices then move their outputs as far as square ones."""
        direction = nesterov_(state["momentum"], grad, scalars["momentum"])
        direction = newton_schulz(direction.to(dtype), self.steps).to(master.dtype)
        shape_scale = max(1.0, master.size(-2) / master.size(-1)) ** 0.5
        master.sub_(direction.mul_(scalars["lr"] * shape_scale))
        if out is not None:
            out.copy_(master)
