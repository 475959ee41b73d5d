"""Matrix products in FP8: scales, quantisation, the scaled product or its emulation; a linear layer, a head.

y = x Wᵀ, dx = g W and dW = gᵀ x with operands of 8 bits: E4M3 (±448, 3 bits of mantissa) for x and W, E5M2 (±57344,
2 bits) for gradients, which need range more than precision (Micikevicius et al., arXiv 2209.05433). A tensor t stands
as clamp(t / s), rounded to nearest, with one fp32 scale s; a product multiplies by both scales. Clamped, because what
a cast does beyond the range differs by device: to infinity, to NaN or to the largest number.

Scales are dynamic (largest magnitude / largest number of the format, found on the device without waiting for it), or
static where a bound is known beforehand (the head's, from modded-nanogpt). They hold no state.

The product alone is a custom operator, since it is one of two: `torch._scaled_mm`, or where there is no fast one its
emulation. Scaling and casting are ordinary operations, so that the compiler fuses them with what makes a tensor.
Not here: which layers use it, and when (model/fp8.py).

Shapes: N tokens, D inputs, O outputs, V vocabulary; M, N, K of a product a_MK · b_NKᵀ.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""What the hardware asks of K and N; the products of a layer so ask it of inputs, outputs and tokens."""
LEAST_AMAX = 2.0**-100
"""Below this a tensor counts as zero: its scale would near the end of fp32."""


class Quantised(NamedTuple):
    """values · scale ≈ the tensor it was made from; values: FP8; scale: fp32, 0-dim."""

    values: Tensor
    scale: Tensor

    def transposed(self) -> Quantised:
        """Of a matrix: laid out anew, since the hardware reads both operands along K."""
        return Quantised(self.values.t().contiguous(), self.scale)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Quantised:
    """x in FP8 (`dtype`), beyond the range the largest number. scale: fp32, 0-dim; None: such that x just fits.

    Where the scale is not given, an x that is not finite becomes NaN, and so stays visible; zeros stay zeros.
    """
    largest = torch.finfo(dtype).max
    if scale is None:
        scale = x.abs().amax().float().clamp(min=LEAST_AMAX) / largest
    return Quantised((x.float() / scale).clamp(-largest, largest).to(dtype), scale)


def product(a_MK: Quantised, b_NK: Quantised, dtype: torch.dtype, *, fast: bool = False, emulated: bool) -> Tensor:
    """a · bᵀ → (M, N) in `dtype` (bf16 or fp32), accumulated in fp32; one operand at most is E5M2.

    fast: the hardware may accumulate in fewer bits than fp32 has. Raises ValueError unless K and N are multiples
    of 16.
    """
    (M, K), N = a_MK.values.shape, b_NK.values.size(0)
    if K % MULTIPLE or N % MULTIPLE:
        raise ValueError(f"an FP8 product of ({M}, {K}) by ({K}, {N}): make the last two multiples of {MULTIPLE}")
    return _product(a_MK.values, b_NK.values, a_MK.scale, b_NK.scale, dtype, fast, emulated)


@torch.library.custom_op("quern::fp8_product", mutates_args=())
def _product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool, emulated: bool
) -> Tensor:
    if emulated:  # FP8 numbers and products of two are exact in fp32: only the order of the sum is open
        return (a.float() @ b.float().t() * (a_scale * b_scale)).to(dtype)
    return torch.ops.aten._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


@_product.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool, emulated: bool) -> Tensor:
    return a.new_empty((a.size(0), b.size(0)), dtype=dtype)


@cache
def has_fast_product(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs on the device, is right, and about as fast as its emulation or faster.

    Found by a tiny product. Libraries run it also on processors without FP8 units, and a thousand times slower.
    """
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
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        product(a, b, torch.float32, emulated=emulated).sum().item()
        best = min(best, time.perf_counter() - start)
    return best


def fp8_linear(x_ND: Tensor, weight_OD: Tensor, emulated: bool) -> Tensor:
    """x Wᵀ → (N, O) in x's dtype, its gradients in FP8 too; scales are dynamic.

    Raises ValueError unless N, D and O are multiples of 16.
    """
    if x_ND.size(0) % MULTIPLE:
        raise ValueError(f"{x_ND.size(0)} tokens cannot be multiplied in FP8: hand in a multiple of {MULTIPLE}")
    return _Linear.apply(x_ND, weight_OD, emulated)


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


@dataclass(frozen=True)
class HeadScales:
    """Static scales of a head; grad: of the gradients by the logits, for a loss whose tokens count 1 each."""

    x: float
    weight: float
    grad: float

    @classmethod
    def for_width(cls, width: int) -> HeadScales:
        """modded-nanogpt's: x is normed, so that no entry exceeds sqrt(width); weights are trusted to stay within 24;
        and no gradient exceeds 1, the largest difference of a probability from its target."""
        return cls(math.sqrt(width) / 448, 24 / 448, 1 / 448)


class HeadProducts:
    """The products of a head for the chunked loss (`cross_entropy.Products`), in FP8 at static scales."""

    def __init__(self, x_ND: Tensor, weight_VD: Tensor, bound: Tensor, scales: HeadScales, emulated: bool) -> None:
        """bound: what no gradient by a logit exceeds, 0-dim."""
        self.dtype, self.emulated = x_ND.dtype, emulated
        self.x = _quantise_compiled(x_ND, E4M3, _constant(scales.x, x_ND.device))
        self.weight = _quantise_compiled(weight_VD, E4M3, _constant(scales.weight, x_ND.device))
        self.weight_transposed = self.weight.transposed()
        self.grad_scale = (bound.float() * scales.grad).clamp(min=LEAST_AMAX)

    def logits(self, part: slice) -> Tensor:
        """(N, V) in x's dtype."""
        return product(self._slice(part), self.weight, self.dtype, fast=True, emulated=self.emulated)

    def gradients(self, part: slice, grad_NV: Tensor, factor_N: Tensor) -> tuple[Tensor, Tensor]:
        """dx in x's dtype and what the slice adds to dW, in fp32.

        The factor goes in before the rounding: it holds a row's softmax denominator, without which rows would differ
        by more than FP8's range.
        """
        grad = Quantised(_rows_scaled(grad_NV, factor_N, self.grad_scale), self.grad_scale)
        dx = product(grad, self.weight_transposed, self.dtype, emulated=self.emulated)
        x_transposed = self._slice(part).transposed()
        return dx, product(grad.transposed(), x_transposed, torch.float32, emulated=self.emulated)

    def _slice(self, part: slice) -> Quantised:
        return Quantised(self.x.values[part], self.x.scale)


def _constant(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)  # written by the device: nothing is copied to it


# The loss is not compiled as a whole; these are one pass each over tensors that are large.


@torch.compile(dynamic=False)
def _quantise_compiled(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Quantised:
    return quantise(x, dtype, scale)


@torch.compile(dynamic=False)
def _rows_scaled(grad_NV: Tensor, factor_N: Tensor, scale: Tensor) -> Tensor:
    """E5M2 of grad · factor / scale."""
    return quantise(grad_NV.float() * factor_N[:, None], E5M2, scale).values
