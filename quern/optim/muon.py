"""Muon: momentum whose every matrix is replaced by (nearly) its polar factor. Update rules on stacks of matrices.

Stacks are (N, R, C): N matrices with R rows (outputs) and C columns (inputs). The order of operations:

    Nesterov momentum → rows to equal norm → orthogonalisation → Frobenius norm to that of an orthogonal
    matrix → variance reduction per row or column → cautious weight decay and step

No modules, no process groups, no global state. Under sharding, a rank must have whole matrices: the polar factor of a
shard is no shard of the polar factor. Source: Muon, Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the
functions cite the other sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quern.optim.adamw import Scalar, Scalars, State
from quern.optim.constants import NEWTON_SCHULZ, POLAR_MARGIN, ROW_FLOOR, TINY, VARIANCE_EPS, polar_coefficients

Orthogonalize = Callable[[Tensor, int], Tensor]
"""(stack (N, R, C), steps) → a stack of the same shape and dtype, with singular values near 1."""
Prepare = Callable[[Tensor], Tensor]
"""The momentum → what is orthogonalised; both (N, R, C)."""
Normalize = Callable[[Tensor, Tensor, Scalar], Tensor]
"""(orthogonalised update (N, R, C), second moment, beta2) → the update; may change the second moment in place."""
Apply = Callable[[Tensor, Tensor, Scalar, Scalar], None]
"""(master, update, rate, weight decay): changes the master in place. The rate has the scale of the shape."""


def polar_express(x_NRC: Tensor, steps: int = 5) -> Tensor:
    """Brings singular values above 1/1000 of the Frobenius norm to about 1 in five steps, in x's dtype."""
    return _iterate(x_NRC, polar_coefficients(steps), margin=POLAR_MARGIN)


def newton_schulz(x_NRC: Tensor, steps: int = 5) -> Tensor:
    """Muon's first iteration: one fixed quintic, which brings singular values into a band around 1."""
    return _iterate(x_NRC, [NEWTON_SCHULZ] * steps, margin=1.0)


def _iterate(x_NRC: Tensor, coefficients: Sequence[tuple[float, float, float]], margin: float) -> Tensor:
    """Scales each matrix to a Frobenius norm of 1/margin, then applies the quintics to its singular values."""
    tall = x_NRC.size(-2) > x_NRC.size(-1)
    x = x_NRC.mT if tall else x_NRC  # so that the Gram matrix is the small one
    accumulated = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=accumulated)
    x = (x / (norm * margin + TINY)).to(x_NRC.dtype)
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def nesterov_(momentum_NRC: Tensor, grad_NRC: Tensor, momentum: Scalar) -> Tensor:
    """Updates the running mean of the gradients in place; returns it with the newest gradient counted once more."""
    grad = grad_NRC.to(momentum_NRC.dtype)
    momentum_NRC.lerp_(grad, 1 - momentum)
    return grad.lerp(momentum_NRC, momentum)


def equal_rows(x_NRC: Tensor) -> Tensor:
    """Scales every row to norm 1, so that none dominates the spectrum; rows below a millionth of the norms' root mean
    square stay shorter. MuonEq-R (arXiv 2603.28254) scales to the mean norm, which the first scaling of the
    orthogonalisation makes equal."""
    norm = torch.linalg.vector_norm(x_NRC, dim=-1, keepdim=True)
    floor = ROW_FLOOR * norm.square().mean(dim=-2, keepdim=True).sqrt()
    return x_NRC / (torch.maximum(norm, floor) + TINY)


def restore_norm(x_NRC: Tensor) -> Tensor:
    """Scales to the Frobenius norm sqrt(min(R, C)) of a semi-orthogonal matrix. Muon+ (arXiv 2602.21545)."""
    target = min(x_NRC.size(-2), x_NRC.size(-1)) ** 0.5
    norm = torch.linalg.vector_norm(x_NRC, dim=(-2, -1), keepdim=True)
    return x_NRC * (target / (norm + TINY))


def reduce_variance_(x_NRC: Tensor, second: Tensor, beta2: Scalar) -> Tensor:
    """Divides rows (second is (N, R, 1)) or columns ((N, 1, C)) by their running RMS, and keeps the Frobenius norm.

    NorMuon (arXiv 2510.05491) does this per row. Here the longer side has the running means, max(R, C) numbers per
    matrix: in an orthogonalised matrix the vectors of the shorter side have norm 1, so only the vectors of the longer
    side vary. There is no bias correction, since a common factor cancels with the norm.
    """
    dim = -1 if second.size(-1) == 1 else -2
    energy = x_NRC.square().mean(dim=dim, keepdim=True)
    second.lerp_(energy, 1 - beta2)
    scale = (second + VARIANCE_EPS).rsqrt()
    before = energy.sum(dim=(-2, -1), keepdim=True)
    after = (energy * scale.square()).sum(dim=(-2, -1), keepdim=True)
    return x_NRC * (scale * (before / (after + TINY)).sqrt())


def cautious_step_(master_NRC: Tensor, update_NRC: Tensor, lr: Scalar, weight_decay: Scalar) -> None:
    """master -= lr · (update + decay · master), decay only where update · master ≥ 0 (arXiv 2510.12402)."""
    against = (update_NRC * master_NRC).sign_().clamp_(max=0)  # -1 or 0; `where` is ten times slower on a CPU
    decayed = torch.addcmul(master_NRC, against, master_NRC)
    master_NRC.sub_(decayed.mul_(weight_decay).add_(update_NRC).mul_(lr))


def restore_and_reduce_(x_NRC: Tensor, second: Tensor, beta2: Scalar) -> Tensor:
    """The orthogonalised update as it is applied: its norm restored, its variance reduced."""
    return reduce_variance_(restore_norm(x_NRC), second, beta2)


@dataclass(frozen=True)
class Muon:
    """Muon with its constants, as the rule of a parameter group (see `groups.Rule`)."""

    beta2: float = 0.9
    weight_decay: float = 0.0
    """Share of the weights that decays at a rate of 1, before the schedule of the decay."""
    steps: int = 5
    prepare: Prepare = equal_rows
    orthogonalize: Orthogonalize = polar_express
    normalize_: Normalize = restore_and_reduce_
    apply_: Apply = cautious_step_

    stacked: ClassVar[bool] = True

    def init_state(self, master: Tensor) -> State:
        count, rows, columns = master.shape
        shape = (count, rows, 1) if rows >= columns else (count, 1, columns)
        return {"momentum": torch.zeros_like(master), "second": master.new_zeros(shape)}

    def scalars(self, step: int, lr: float, momentum: float, decay: float) -> dict[str, float]:
        return {"lr": lr, "momentum": momentum, "beta2": self.beta2, "weight_decay": self.weight_decay * decay}

    def update_(
        self, master: Tensor, grad: Tensor, state: State, scalars: Scalars, *, dtype: torch.dtype, out: Tensor | None
    ) -> None:
        """Updates stacks (N, R, C); the second moments are (N, R, 1) or (N, 1, C). It can be compiled whole.

        The rate is scaled by sqrt(max(1, R/C)), so that the RMS effect of a step on the outputs does not depend on the
        shape.
        """
        update = self.prepare(nesterov_(state["momentum"], grad, scalars["momentum"]))
        update = self.orthogonalize(update.to(dtype), self.steps).to(master.dtype)
        update = self.normalize_(update, state["second"], scalars["beta2"])
        shape_scale = max(1.0, master.size(-2) / master.size(-1)) ** 0.5
        self.apply_(master, update, scalars["lr"] * shape_scale, scalars["weight_decay"])
        if out is not None:
            out.copy_(master)


@dataclass(frozen=True)
class PlainMuon:
    """Muon as first published: momentum, one fixed quintic and a step, without decay, second moment and equal rows."""

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


class MuonH(PlainMuon):
    """Muon on the sphere: W ← R · normalize(W - lr · R · normalize(u)) keeps every matrix at its initial norm, R.

    u is Muon's update, lr the relative change of a step; there is no weight decay. A matrix must not start at zero.
    Source: the post "Fantastic Pretraining Optimizers and Where to Find Them 2.1: Hyperball Optimization".
    """

    def init_state(self, master: Tensor) -> State:
        return {**super().init_state(master), "radius": norms(master)}

    def update_(
        self, master: Tensor, grad: Tensor, state: State, scalars: Scalars, *, dtype: torch.dtype, out: Tensor | None
    ) -> None:
        update = equal_rows(nesterov_(state["momentum"], grad, scalars["momentum"]))
        update = polar_express(update.to(dtype), self.steps).to(master.dtype)
        sphere_step_(master, update, state["radius"], scalars["lr"])
        if out is not None:
            out.copy_(master)


def norms(x_NRC: Tensor) -> Tensor:
    """Frobenius norms, (N, 1, 1)."""
    return torch.linalg.vector_norm(x_NRC, dim=(-2, -1), keepdim=True)


def sphere_step_(master_NRC: Tensor, update_NRC: Tensor, radius_N11: Tensor, lr: Scalar) -> None:
    """One step along the update, in place, and back to the radius."""
    moved = master_NRC - update_NRC * (radius_N11 * lr / (norms(update_NRC) + TINY))
    master_NRC.copy_(moved * (radius_N11 / (norms(moved) + TINY)))
