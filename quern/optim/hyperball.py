"""Hyperball: updates that keep every matrix at its initial Frobenius norm, R.

    W ← R · normalize(W − lr · R · normalize(u))

u is the update of another rule: Muon's (`MuonH`) or Adam's (`AdamH`). lr is the relative change of a step; there is no
weight decay. A matrix must not start at zero. Rules on stacks (N, R, C), as in muon.py. Source: the post
"Fantastic Pretraining Optimizers and Where to Find Them 2.1: Hyperball Optimization".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quern.optim.adamw import Scalar, Scalars, State
from quern.optim.constants import TINY
from quern.optim.muon import equal_rows, nesterov_, polar_express


def norms(x_NRC: Tensor) -> Tensor:
    """Frobenius norms, (N, 1, 1)."""
    return torch.linalg.vector_norm(x_NRC, dim=(-2, -1), keepdim=True)


def sphere_step_(master_NRC: Tensor, update_NRC: Tensor, radius_N11: Tensor, lr: Scalar) -> None:
    """One step along the update, in place, and back to the radius."""
    moved = master_NRC - update_NRC * (radius_N11 * lr / (norms(update_NRC) + TINY))
    master_NRC.copy_(moved * (radius_N11 / (norms(moved) + TINY)))


@dataclass(frozen=True)
class MuonH:
    """The rule of a parameter group (see `groups.Rule`). steps: iterations of the orthogonalisation."""

    steps: int = 5

    stacked: ClassVar[bool] = True

    def init_state(self, master: Tensor) -> State:
        return {"momentum": torch.zeros_like(master), "radius": norms(master)}

    def scalars(self, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        return {"lr": lr, "momentum": momentum}

    def update_(
        self, master: Tensor, grad: Tensor, state: State, scalars: Scalars, *, dtype: torch.dtype, out: Tensor | None
    ) -> None:
        update = equal_rows(nesterov_(state["momentum"], grad, scalars["momentum"]))
        update = polar_express(update.to(dtype), self.steps).to(master.dtype)
        sphere_step_(master, update, state["radius"], scalars["lr"])
        if out is not None:
            out.copy_(master)


@dataclass(frozen=True)
class AdamH:
    """The rule of a parameter group (see `groups.Rule`). Adam's direction needs no bias correction of m: it has no
    effect on a normalised update."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10

    stacked: ClassVar[bool] = True

    def init_state(self, master: Tensor) -> State:
        return {"m": torch.zeros_like(master), "v": torch.zeros_like(master), "radius": norms(master)}

    def scalars(self, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        beta1, beta2 = self.betas
        return {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": self.eps, "correction": (1 - beta2**step) ** 0.5}

    def update_(
        self, master: Tensor, grad: Tensor, state: State, scalars: Scalars, *, dtype: torch.dtype, out: Tensor | None
    ) -> None:
        grad = grad.to(master.dtype)
        state["m"].lerp_(grad, 1 - scalars["beta1"])
        state["v"].lerp_(grad.square(), 1 - scalars["beta2"])
        update = state["m"] / (state["v"].sqrt() / scalars["correction"] + scalars["eps"])
        sphere_step_(master, update, state["radius"], scalars["lr"])
        if out is not None:
            out.copy_(master)
