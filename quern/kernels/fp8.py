"""FP8 matrix products: scales, quantisation, the scaled product and its emulation; a linear layer and a head.

y = x Wᵀ, dx = g W and dW = gᵀ x with operands in E4M3, gradients in E5M2 (Micikevicius et al., arXiv 2209.05433). A
tensor t is stored as clamp(t / s) with one fp32 scale s. docs/numerics.md explains scales, clamp and emulation;
model/fp8.py decides which layers use FP8.

Shapes: N tokens, D inputs, O outputs, V vocabulary; M, N, K of a product a_MK · b_NKᵀ.
"""

from __future__ import annotations

import math
import timeit
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quern import compiler
from quern.kernels.cross_entropy import Products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The hardware needs multiples for K and N. In the products of a layer these are inputs, outputs and tokens."""
LEAST_AMAX = 2.0**-100
"""The scale of a tensor with a smaller largest magnitude is this one's, so that it loses digits, and ends as zero: its
own would be close to fp32's smallest number."""


class Quantised(NamedTuple):
    """values · scale ≈ the original tensor. values: FP8; scale: fp32, 0-dim."""

    values: Tensor
    scale: Tensor

    def transposed(self) -> Quantised:
        """The transposed matrix, contiguous, since the hardware reads both operands along K."""
        return Quantised(self.values.t().contiguous(), self.scale)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Quantised:
    """Casts x to FP8; values beyond the range become the largest number.

    scale: fp32, 0-dim; None chooses the scale at which x just fits. Then a non-finite x becomes NaN everywhere, and
    zeros stay zeros.
    """
    largest = torch.finfo(dtype).max
    if scale is None:
        scale = x.abs().amax().float().clamp(min=LEAST_AMAX) / largest
    return Quantised((x.float() / scale).clamp(-largest, largest).to(dtype), scale)


def product(a_MK: Quantised, b_NK: Quantised, dtype: torch.dtype, *, fast: bool = False, emulated: bool) -> Tensor:
    """a · bᵀ → (M, N) in bf16 or fp32, accumulated in fp32; at most one operand is E5M2.

    fast: the hardware may accumulate in fewer bits than fp32 has; emulated: multiply in fp32. Raises ValueError if K or
    N is no multiple of 16.
    """
    (M, K), N = a_MK.values.shape, b_NK.values.size(0)
    if K % MULTIPLE or N % MULTIPLE:
        raise ValueError(f"an FP8 product of ({M}, {K}) by ({K}, {N}): make the last two multiples of {MULTIPLE}")
    return _product(a_MK.values, b_NK.values, a_MK.scale, b_NK.scale, dtype, fast, emulated)


@torch.library.custom_op("quern::fp8_product", mutates_args=())
def _product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool, emulated: bool
) -> Tensor:
    if emulated:  # FP8 numbers and products of two of them are exact in fp32: only the order of the sum differs
        return (a.float() @ b.float().t() * (a_scale * b_scale)).to(dtype)
    return torch.ops.aten._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


@_product.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool, emulated: bool) -> Tensor:
    return a.new_empty((a.size(0), b.size(0)), dtype=dtype)


@cache
def has_fast_product(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs on the device, is correct, and is not much slower than its emulation, as it is
    where the processor has no FP8 units. A tiny product decides."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).to(device) for _ in range(2))
    try:
        for kind in (E4M3, E5M2):
            first, second = quantise(a, kind), quantise(b, E4M3)
            expected, found = (product(first, second, torch.float32, emulated=e) for e in (True, False))
            if not (found - expected).abs().amax().item() <= 1e-3 * expected.abs().amax().item():
                return False
            if _best_seconds(first, second, emulated=False) > 10 * _best_seconds(first, second, emulated=True):
                return False
    except (RuntimeError, TypeError):  # the device has no such operation, or no such dtype
        return False
    return True


def _best_seconds(a: Quantised, b: Quantised, *, emulated: bool) -> float:
    return min(timeit.repeat(lambda: product(a, b, torch.float32, emulated=emulated).sum().item(), number=1, repeat=3))


def fp8_linear(x_ND: Tensor, weight_OD: Tensor, emulated: bool) -> Tensor:
    """x Wᵀ → (N, O) in x's dtype, in FP8 forward and backward with dynamic scales."""
    N, missing = len(x_ND), -len(x_ND) % MULTIPLE  # the stream of three shards may have two tokens more than a row
    return _Linear.apply(F.pad(x_ND, (0, 0, 0, missing)) if missing else x_ND, weight_OD, emulated)[:N]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor, emulated: bool) -> Tensor:
        x, weight = quantise(x_ND, E4M3), quantise(weight_OD, E4M3)
        ctx.save_for_backward(*x, *weight)
        ctx.emulated, ctx.dtypes = emulated, (x_ND.dtype, weight_OD.dtype)
        return product(x, weight, x_ND.dtype, fast=True, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, weight = Quantised(*saved[:2]), Quantised(*saved[2:])
        x_dtype, weight_dtype = ctx.dtypes
        grad = quantise(grads[0], E5M2)
        dx = product(grad, weight.transposed(), x_dtype, emulated=ctx.emulated)
        dw = product(grad.transposed(), x.transposed(), weight_dtype, emulated=ctx.emulated)
        return dx, dw, None


class HeadProducts(Products):
    """The products of a head for the chunked loss, in FP8 with static scales.

    At these scales the bounds become the largest numbers of the formats, 448 of E4M3 and 57,344 of E5M2. x is normed,
    so no entry exceeds sqrt(width), except by the gain of llama's norm: it is clamped. Weights are assumed to stay
    within 24, as in modded-nanogpt, which divides the bound of the gradient by 448, a bug that nanochat's log points
    out (docs/numerics.md).
    """

    def __init__(self, x_ND: Tensor, weight_VD: Tensor, bound: Tensor, emulated: bool) -> None:
        """bound: a bound of the magnitude of the gradients with respect to the logits, 0-dim."""
        self.dtype, self.emulated = x_ND.dtype, emulated
        self.x = _quantise_compiled(x_ND, E4M3, _constant(math.sqrt(x_ND.size(1)) / 448, x_ND.device))
        self.weight = _quantise_compiled(weight_VD, E4M3, _constant(24 / 448, x_ND.device))
        self.weight_transposed = self.weight.transposed()
        self.grad_scale = (bound.float() * (1 / 57344)).clamp(min=LEAST_AMAX)

    def logits(self, part: slice) -> Tensor:
        """(N, V) in x's dtype."""
        return product(self._slice(part), self.weight, self.dtype, fast=True, emulated=self.emulated)

    def gradients(self, part: slice, grad_NV: Tensor, factor_N: Tensor) -> tuple[Tensor, Tensor]:
        """dx in x's dtype, and the slice's contribution to dW in fp32.

        The factor is multiplied before the rounding: it holds a row's softmax denominator, without which rows would
        differ by more than FP8's range.
        """
        grad = Quantised(_rows_scaled(grad_NV, factor_N, self.grad_scale), self.grad_scale)
        dx = product(grad, self.weight_transposed, self.dtype, emulated=self.emulated)
        x_transposed = self._slice(part).transposed()
        return dx, product(grad.transposed(), x_transposed, torch.float32, emulated=self.emulated)

    def _slice(self, part: slice) -> Quantised:
        return Quantised(self.x.values[part], self.x.scale)


def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)  # no copy from the host


# The loss is not compiled as a whole; each of these is one pass over a large tensor.


@compiler.compiled
def _quantise_compiled(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Quantised:
    return quantise(x, dtype, scale)


@compiler.compiled
def _rows_scaled(grad_NV: Tensor, factor_N: Tensor, scale: Tensor) -> Tensor:
    """E5M2 of grad · factor / scale."""
    return quantise(grad_NV.float() * factor_N[:, None], E5M2, scale).values
