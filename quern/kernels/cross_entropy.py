"""Linear head + softcap + cross-entropy without the full logits: the plain twin and the chunked path.

loss_n = scale_n · (logsumexp(z_n) - z_n[target_n]) with z = cap(x Wᵀ), in nats, computed in fp32 from logits in the
compute dtype. The caller's `scale` holds mask, weight and normaliser at once.

The chunked path takes a slice of tokens at a time and computes the gradients of x and W along with the loss, as Liger
(arXiv 2410.10989) does, so a backward pass only multiplies by a scalar. Where a cap bounds the logits, no maximum is
subtracted. The softmax denominator of a row is only a factor of that row: the gradient is stored unnormalised in one
pass over the logits, and the factor multiplies the small matrices on either side. Two parts are arguments: how the
three products of the head are computed (`Products`), and how the gradient of a chunk is computed (`ChunkPath`):
`COMPILED`, or on a GPU `TRITON`, whose kernel (cross_entropy_triton.py) writes the gradient over the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quern import compiler
from quern.compiler import TRITON_FOUND
from quern.kernels.softcap import Cap

CHUNK_TOKENS = 2048
CHUNK_LOGITS = 2**24
"""The most logits in a chunk of more than 64 tokens, whatever CHUNK_TOKENS: larger products run closer to the peak, but
a chunk's logits and their gradient are most of the memory of the loss."""
GPU_CHUNK_LOGITS = 2**27
"""A GPU reaches its peak on larger products only, and stores no gradient besides the logits."""
MAX_HEIGHT = 60.0
"""exp(height) times the vocabulary must stay far below the largest fp32."""


def cross_entropy_plain(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, cap: Cap) -> Tensor:
    """The definition → (N,) fp32 losses in nats."""
    return F.cross_entropy(cap((x_ND @ weight_VD.T).float()), targets_N, reduction="none")


class Products:
    """The three products of hidden states and a head's weight, for a slice of the tokens at a time. These are in the
    dtype of the operands, and do not use `bound`."""

    def __init__(self, x_ND: Tensor, weight_VD: Tensor, bound: Tensor) -> None:
        self.x_ND, self.weight_VD = x_ND, weight_VD

    def logits(self, part: slice) -> Tensor:
        """x Wᵀ, in x's dtype."""
        return self.x_ND[part] @ self.weight_VD.T

    def gradients(self, part: slice, grad_NV: Tensor, factor_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns dx of the slice and its part of dW; grad · factor[:, None] is the gradient by its logits."""
        dx = (grad_NV @ self.weight_VD) * factor_N[:, None]
        return dx, grad_NV.T @ (self.x_ND[part] * factor_N[:, None]).to(self.x_ND.dtype)


MakeProducts = Callable[[Tensor, Tensor, Tensor], Products]
"""(x (N, D), weight (V, D), bound of the gradients by the logits, 0-dim) → the products of one call of the loss."""


@dataclass(frozen=True)
class ChunkPath:
    """The losses and gradients of a chunk of logits (N, V), as functions that may overwrite the logits.

    losses: (logits, integer targets (N,), cap) → (N,) fp32 losses in nats.
    gradient: (logits, targets, scale, cap) → the losses; a factor (N,) = scale · steepest slope / denominator; and the
    gradient by the logits divided by that factor, (N, V).
    """

    losses: Callable[[Tensor, Tensor, Cap], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Cap], tuple[Tensor, Tensor, Tensor]]
    chunk_tokens: int
    chunk_logits: int

    def chunks(self, N: int, V: int) -> list[slice]:
        """The slices of tokens that are the chunks."""
        size = min(self.chunk_tokens, max(64, self.chunk_logits // V // 64 * 64))
        return [slice(start, start + size) for start in range(0, N, size)]


def cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    scale_N: Tensor,
    cap: Cap,
    products: MakeProducts = Products,
    path: ChunkPath | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the loss of a linear head.

    Args:
        targets_N: Integers in [0, V), also where scale is 0.
        scale_N: fp32.
        products: Used where gradients are recorded; otherwise the product is plain.
        path: None for the path of the device.

    Returns:
        Σ scale · loss, a differentiable fp32 scalar; (N,) fp32 losses, unscaled and not differentiable.

    Raises:
        ValueError: The cap bounds the logits, but to a range of more than 120.
    """
    if cap.tanh_form is not None and cap.tanh_form[0] > MAX_HEIGHT:
        raise ValueError(
            f"{cap} is too wide for the chunked loss: keep the range of logits to {2 * MAX_HEIGHT:g} "
            f"(TanhCap({MAX_HEIGHT:g}), SigmoidCap({2 * MAX_HEIGHT:g})), or use NoCap()"
        )
    path = path or path_for(x_ND)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(x_ND, weight_VD, targets_N, scale_N, cap, products, path)
    losses = torch.empty(x_ND.size(0), dtype=torch.float32, device=x_ND.device)
    for part in path.chunks(x_ND.size(0), weight_VD.size(0)):
        losses[part] = path.losses(x_ND[part] @ weight_VD.T, targets_N[part], cap)
    return (losses * scale_N).sum(), losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        scale_N: Tensor,
        cap: Cap,
        products: MakeProducts,
        path: ChunkPath,
    ) -> tuple[Tensor, Tensor]:
        N = x_ND.size(0)
        steepest = cap.tanh_form[0] / cap.tanh_form[1] if cap.tanh_form is not None else 1.0
        head = products(x_ND, weight_VD, steepest * scale_N.abs().amax())
        losses = torch.empty(N, dtype=torch.float32, device=x_ND.device)
        dx = torch.empty_like(x_ND)
        dw = torch.zeros_like(weight_VD, dtype=torch.float32)
        for part in path.chunks(N, weight_VD.size(0)):
            logits = head.logits(part)
            losses[part], factor, grad = path.gradient(logits, targets_N[part], scale_N[part], cap)
            del logits  # frees the chunk before the next one is made
            dx[part], slice_dw = head.gradients(part, grad, factor)
            del grad
            dw += slice_dw
        ctx.save_for_backward(dx, dw.to(weight_VD.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * scale_N).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx * grads[0].to(dx.dtype), dw * grads[0].to(dw.dtype), None, None, None, None, None


def _losses(logits_NV: Tensor, targets_N: Tensor, cap: Cap) -> Tensor:
    """It runs eagerly, so a cap's steps overwrite one fp32 copy of the logits: new memory takes longer than they do."""
    if cap.tanh_form is None:
        return F.cross_entropy(logits_NV.float(), targets_N, reduction="none")
    height, divisor = cap.tanh_form
    capped = logits_NV.float().mul_(1 / divisor).tanh_()
    at_target = capped.gather(1, targets_N[:, None])[:, 0]
    return capped.mul_(height).exp_().sum(-1).log_() - height * at_target


def _gradient(logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, cap: Cap) -> tuple[Tensor, Tensor, Tensor]:
    if cap.tanh_form is None:
        return _uncapped(logits_NV, targets_N, scale_N)
    height, divisor = cap.tanh_form
    slope_N = torch.full_like(scale_N, 1 / divisor)
    return _capped(logits_NV, targets_N, scale_N, slope_N, height)


@compiler.compiled
def _capped(
    logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, slope_N: Tensor, height: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The cap is height · tanh(slope · z). The slope has one entry per row, since only then does the compiler loop over
    rows and sum a row's exponentials without storing them."""
    y = logits_NV.float() * slope_N[:, None]
    compiling = torch.compiler.is_compiling()
    capped = rational_tanh(y) if compiling else torch.tanh(y)
    e = polynomial_exp(capped, height) if compiling else torch.exp(height * capped)
    total = e.sum(-1)
    grad = (e * (1 - capped * capped)).to(logits_NV.dtype)
    t = torch.tanh(logits_NV.gather(1, targets_N[:, None]).float() * slope_N[:, None])
    at_target = (torch.exp(height * t) - total[:, None]) * (1 - t * t)
    grad = grad.scatter(1, targets_N[:, None], at_target.to(grad.dtype))
    return torch.log(total) - height * t[:, 0], scale_N * (height * slope_N) / total, grad


@compiler.compiled
def _uncapped(logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Subtracts the row's maximum, without which exp would overflow."""
    highest = logits_NV.amax(-1, keepdim=True).float()
    e = torch.exp(logits_NV.float() - highest)
    total = e.sum(-1)
    z = logits_NV.gather(1, targets_N[:, None]).float() - highest
    grad = e.to(logits_NV.dtype).scatter(1, targets_N[:, None], (torch.exp(z) - total[:, None]).to(logits_NV.dtype))
    return torch.log(total) - z[:, 0], scale_N / total, grad


# tanh and exp in plain arithmetic: the compiler inlines and vectorises these. It would call library functions for each
# vector, which take a third of a CPU's training step. Without the compiler they would be 40 passes over the logits, and
# the library's functions are two.

_TANH_TOP = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
             1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
_TANH_BOTTOM = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def rational_tanh(y: Tensor) -> Tensor:
    """tanh as the rational function of Eigen and XLA, ≤ 4e-7 absolute error in fp32."""
    y = y.clamp(-7.90531110763549805, 7.90531110763549805)
    square = y * y
    return y * _polynomial(square, _TANH_TOP) / _polynomial(square, _TANH_BOTTOM)


def polynomial_exp(capped: Tensor, height: float) -> Tensor:
    """exp(height · capped) for |capped| ≤ 1: a Taylor polynomial of a small part, squared repeatedly."""
    squarings = max(0, math.ceil(math.log2(height / 0.5)))
    value = _polynomial(capped * (height / 2**squarings), tuple(1 / math.factorial(i) for i in range(7, -1, -1)))
    while squarings:  # as powers: the compiler would expand products into 2^squarings factors
        value = value.pow(2 ** min(squarings, 4))
        squarings -= min(squarings, 4)
    return value


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = x * coefficients[0] + coefficients[1]
    for c in coefficients[2:]:
        value = value * x + c
    return value


COMPILED = ChunkPath(_losses, _gradient, CHUNK_TOKENS, CHUNK_LOGITS)


@torch.library.custom_op("quern::cross_entropy", mutates_args=("logits_NV",))
def _operator(
    logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, height: float | None, divisor: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns losses and factor; with `gradient`, overwrites the logits. height None: no cap."""
    from quern.kernels.cross_entropy_triton import losses_and_factor

    with torch.cuda.device_of(logits_NV):
        return losses_and_factor(logits_NV, targets_N, scale_N, height, divisor, gradient)


@_operator.register_fake
def _(logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(scale_N), torch.empty_like(scale_N)


def _triton_losses(logits_NV: Tensor, targets_N: Tensor, cap: Cap) -> Tensor:
    scale_N = torch.ones(targets_N.shape, dtype=torch.float32, device=targets_N.device)
    return _operator(logits_NV, targets_N, scale_N, *(cap.tanh_form or (None, 1.0)), gradient=False)[0]


def _triton_gradient(logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, cap: Cap) -> tuple[Tensor, Tensor, Tensor]:
    losses, factor = _operator(logits_NV, targets_N, scale_N, *(cap.tanh_form or (None, 1.0)), gradient=True)
    return losses, factor, logits_NV


TRITON = ChunkPath(_triton_losses, _triton_gradient, 2**20, GPU_CHUNK_LOGITS)


def path_for(x_ND: Tensor) -> ChunkPath:
    """The path that suits the device."""
    return TRITON if x_ND.is_cuda and TRITON_FOUND else COMPILED
