"""Rotary positions in Triton, with or without RMSNorm, forward and backward; see rope.py for what they compute.

A row is one head of one token. A program loads ROWS whole rows, so that the norm needs no second pass: both halves of
each head, and the token's row of the tables. It computes in fp32 and is bound by memory.

The file imports Triton, so the first call imports it.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_ELEMENTS = 4096
"""Elements of x in one program; 32 for each thread of four warps."""


def turn(x_BTHE: Tensor, cos: Tensor, sin: Tensor, *, back: bool, gain: float | None, eps: float) -> Tensor:
    """Rotates x clockwise, or `back`. With a gain, scales each head to a root mean square of `gain`."""
    y_BTHE = torch.empty(x_BTHE.shape, dtype=x_BTHE.dtype, device=x_BTHE.device)
    x_BTHE = _readable(x_BTHE)
    scalars = {"direction": -1.0 if back else 1.0, "gain": 1.0 if gain is None else gain, "eps": eps}
    tensors = {"x": x_BTHE, "x_strides": x_BTHE.stride()[:3], "y": y_BTHE}
    _launch(turn_kernel, x_BTHE, cos, sin, {**tensors, **scalars, "NORM": gain is not None})
    return y_BTHE


def turn_back_normed(grad_BTHE: Tensor, x_BTHE: Tensor, cos: Tensor, sin: Tensor, *, gain: float, eps: float) -> Tensor:
    """Returns the gradient of x, given the gradient of the output of `turn` with a gain."""
    dx_BTHE = torch.empty(x_BTHE.shape, dtype=x_BTHE.dtype, device=x_BTHE.device)
    x_BTHE, grad_BTHE = _readable(x_BTHE), _readable(grad_BTHE)
    tensors = {"x": x_BTHE, "x_strides": x_BTHE.stride()[:3], "grad": grad_BTHE, "dx": dx_BTHE}
    scalars = {"grad_strides": grad_BTHE.stride()[:3], "gain": gain, "eps": eps}
    _launch(norm_gradient_kernel, x_BTHE, cos, sin, {**tensors, **scalars})
    return dx_BTHE


def _readable(x_BTHE: Tensor) -> Tensor:
    """Slices of a merged projection need no copy."""
    return x_BTHE if x_BTHE.stride(-1) == 1 else x_BTHE.contiguous()


def _launch(kernel: Any, x_BTHE: Tensor, cos: Tensor, sin: Tensor, arguments: dict[str, Any]) -> None:
    B, T, H, E = x_BTHE.shape
    half = triton.next_power_of_2(E // 2)
    rows = max(1, PROGRAM_ELEMENTS // (2 * half))
    cos, sin = cos.contiguous(), sin.contiguous()
    sizes = {"table_stride": 0 if cos.size(0) == 1 else T * (E // 2), "B": B, "T": T, "H": H}
    grid: Callable[..., Any] = kernel[(triton.cdiv(B * T * H, rows),)]
    grid(cos=cos, sin=sin, **sizes, **arguments, E=E, HALF=half, ROWS=rows, num_warps=4)


@triton.jit
def places(B, T, H, E: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Batch, token and head (ROWS, 1) of this program's rows, columns of a half (1, HALF), and which of them exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    there = (row < B * T * H) & (column < E // 2)
    return tl.cast(row // (T * H), tl.int64), row // H % T, row % H, column, there


@triton.jit
def load_angles(cos, sin, stride, where, E: tl.constexpr):
    """Cosines and sines (ROWS, HALF). stride: the tables' batch stride, 0 where all rows share one."""
    batch, token, _, column, there = where
    at = batch * stride + token * (E // 2) + column
    return tl.load(cos + at, mask=there, other=0.0), tl.load(sin + at, mask=there, other=0.0)


@triton.jit
def load_halves(x, strides, where, E: tl.constexpr):
    """First and second half of each head, (ROWS, HALF) fp32."""
    batch, token, head, column, there = where
    at = x + batch * strides[0] + tl.cast(token, tl.int64) * strides[1] + head * strides[2] + column
    first = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return first, tl.load(at + E // 2, mask=there, other=0.0).to(tl.float32)


@triton.jit
def store_halves(x, first, second, where, T, H, E: tl.constexpr):
    """Stores to a contiguous (B, T, H, E)."""
    batch, token, head, column, there = where
    at = x + ((batch * T + token) * H + head) * E + column
    tl.store(at, first.to(x.dtype.element_ty), mask=there)
    tl.store(at + E // 2, second.to(x.dtype.element_ty), mask=there)


@triton.jit
def inverse_norm(first, second, eps, E: tl.constexpr):
    """1 / root mean square of each row, (ROWS, 1)."""
    return tl.rsqrt(tl.sum(first * first + second * second, 1, keep_dims=True) / E + eps)


@triton.jit
def turn_kernel(
    x, x_strides, y, cos, sin, table_stride, B, T, H, direction, gain, eps,
    NORM: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """direction: 1 clockwise, -1 back."""
    where = places(B, T, H, E, HALF, ROWS)
    c, s = load_angles(cos, sin, table_stride, where, E)
    first, second = load_halves(x, x_strides, where, E)
    s = s * direction
    turned_first = first * c + second * s
    turned_second = second * c - first * s
    if NORM:
        scale = gain * inverse_norm(first, second, eps, E)
        turned_first = turned_first * scale
        turned_second = turned_second * scale
    store_halves(y, turned_first, turned_second, where, T, H, E)


@triton.jit
def norm_gradient_kernel(
    x, x_strides, grad, grad_strides, dx, cos, sin, table_stride, B, T, H, gain, eps,
    E: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Computes, with n = x / rms and g the gradient turned back, dx = gain / rms · (g - n · mean(n · g))."""
    where = places(B, T, H, E, HALF, ROWS)
    c, s = load_angles(cos, sin, table_stride, where, E)
    first, second = load_halves(x, x_strides, where, E)
    turned_first, turned_second = load_halves(grad, grad_strides, where, E)
    grad_first = turned_first * c - turned_second * s
    grad_second = turned_second * c + turned_first * s
    inverse = inverse_norm(first, second, eps, E)
    first = first * inverse
    second = second * inverse
    along = tl.sum(first * grad_first + second * grad_second, 1, keep_dims=True) / E
    scale = gain * inverse
    store_halves(dx, scale * (grad_first - first * along), scale * (grad_second - second * along), where, T, H, E)
