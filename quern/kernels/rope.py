"""Rotary positions (RoFormer, arXiv 2104.09864), alone or with the RMSNorm of queries and keys.

x: (B, T, H, E). The pairs (i, i + E/2) of a head are rotated clockwise by the angles of their position. The tables of
cosines and sines are (1 or B, T, 1, E/2) fp32. Pairs that do not rotate, as half of them in half-truncated RoPE, have
an angle of zero in the table: the kernels are bound by reading x, which that does not change. A rotation keeps the
norm, so norm and rotation commute up to rounding. The gradient is the rotation back.

On a GPU a kernel reads and writes each element once (rope_triton.py). On other devices the plain twins run, and the
compiler fuses them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.compiler import TRITON_FOUND

EPS = 1e-6
"""The constant added to the mean square of a head."""


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (…, T, 1, E / 2), fp32, of the angles at positions (…, T), by frequencies (E / 2,) in radians.

    For several tokens, call it outside of compiled code: the compiler would compute the cosines again for every element
    of every layer.
    """
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BTHE: Tensor, cos: Tensor, sin: Tensor, gain: float | None = None) -> Tensor:
    """Rotates each pair clockwise, computed in fp32 → (B, T, H, E) in x's dtype. With -sin it rotates back.

    gain: also scale each head to this root mean square.
    """
    operator = x_BTHE.is_cuda and TRITON_FOUND
    return rotate_operator(x_BTHE, cos, sin, gain, False) if operator else rotate_plain(x_BTHE, cos, sin, gain)


def rotate_plain(x_BTHE: Tensor, cos: Tensor, sin: Tensor, gain: float | None = None) -> Tensor:
    first, second = x_BTHE.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(x_BTHE.dtype)
    if gain is None:
        return turned
    return F.rms_norm(turned.float(), (turned.size(-1),), eps=EPS).to(turned.dtype) * gain


@torch.library.custom_op("quern::rotate", mutates_args=())
def rotate_operator(x_BTHE: Tensor, cos: Tensor, sin: Tensor, gain: float | None, back: bool) -> Tensor:
    """Returns a contiguous tensor. gain: root mean square of each head, None for no norm; back: counterclockwise."""
    from quern.kernels.rope_triton import turn

    with torch.cuda.device_of(x_BTHE):
        return turn(x_BTHE, cos, sin, back=back, gain=gain, eps=EPS)


@rotate_operator.register_fake
def _(x_BTHE: Tensor, *others: Any) -> Tensor:
    return x_BTHE.new_empty(x_BTHE.shape)


@torch.library.custom_op("quern::rotate_normed_backward", mutates_args=())
def rotate_normed_backward(grad_BTHE: Tensor, x_BTHE: Tensor, cos: Tensor, sin: Tensor, gain: float) -> Tensor:
    """dx, contiguous; recomputes the norm from x."""
    from quern.kernels.rope_triton import turn_back_normed

    with torch.cuda.device_of(x_BTHE):
        return turn_back_normed(grad_BTHE, x_BTHE, cos, sin, gain=gain, eps=EPS)


@rotate_normed_backward.register_fake
def _(grad_BTHE: Tensor, x_BTHE: Tensor, *others: Any) -> Tensor:
    return x_BTHE.new_empty(x_BTHE.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float | None, bool], output: Tensor) -> None:
    x, cos, sin, ctx.gain, ctx.back = inputs
    ctx.save_for_backward(None if ctx.gain is None else x, cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    x, cos, sin = ctx.saved_tensors
    if ctx.gain is None:
        return rotate_operator(grad, cos, sin, None, not ctx.back), None, None, None, None
    return rotate_normed_backward(grad, x, cos, sin, ctx.gain), None, None, None, None


rotate_operator.register_autograd(_backward, setup_context=_save)
