"""alpha · X Xᵀ + beta · A for stacks of matrices: computes one triangle of blocks and mirrors it.

The result is symmetric, as A must be, so half of the work is enough. X may be symmetric itself; X Xᵀ is then its
square. These are two of the three products in each step of Muon's iteration (optim/muon.py). Only `quern bench gpu`
uses the kernel: Muon does not, until a whole training step is measured to be faster. modded-nanogpt, the source of the
idea, reports that the gain washed out.

A plain twin, and an operator around a Triton kernel (symmetric_triton.py). Shapes: N matrices, R rows, C columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quern.compiler import TRITON_FOUND


def symmetric_product(x_NRC: Tensor, a_NRR: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """alpha · x xᵀ + beta · a → (N, R, R) in x's dtype, accumulated in fp32. a: symmetric; None counts as zeros."""
    if x_NRC.is_cuda and TRITON_FOUND:
        return symmetric_product_operator(x_NRC, a_NRR, beta, alpha)
    return symmetric_product_plain(x_NRC, a_NRR, beta, alpha)


def symmetric_product_plain(
    x_NRC: Tensor, a_NRR: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    if a_NRR is None:
        a_NRR, beta = x_NRC.new_zeros(1), 0.0
    return torch.baddbmm(a_NRR, x_NRC, x_NRC.mT, beta=beta, alpha=alpha)


@torch.library.custom_op("quern::symmetric_product", mutates_args=())
def symmetric_product_operator(x_NRC: Tensor, a_NRR: Tensor | None, beta: float, alpha: float) -> Tensor:
    from quern.kernels.symmetric_triton import product

    with torch.cuda.device_of(x_NRC):
        return product(x_NRC, a_NRR, beta, alpha)


@symmetric_product_operator.register_fake
def _(x_NRC: Tensor, a_NRR: Tensor | None, beta: float, alpha: float) -> Tensor:
    N, R, _ = x_NRC.shape
    return x_NRC.new_empty(N, R, R)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, float, float], output: Tensor) -> None:
    x, _, ctx.beta, ctx.alpha = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    (x,) = ctx.saved_tensors
    dx = torch.bmm(grad + grad.mT, x) * ctx.alpha
    return dx, ctx.beta * grad if ctx.needs_input_grad[1] else None, None, None


symmetric_product_operator.register_autograd(_backward, setup_context=_save)
