"""Softcap and cross-entropy of a chunk of logits in Triton: losses, and the gradient written over the logits.

One program computes a row. Under a cap, logits are bounded, so one pass over the row reads each logit, writes
exp(capped) · slope in its place and sums the denominator. Without a cap a first pass finds the maximum and the
denominator, online (Milakov & Gimelshein 2018, arXiv 1805.02867), and a second pass writes. The denominator, known only
at the end, is a factor of its row outside the gradient (cross_entropy.py). As Liger (arXiv 2410.10989), with one pass
less.

The file imports Triton, so the first call imports it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program holds at a time."""


def losses_and_factor(
    logits_NV: Tensor, targets_N: Tensor, scale_N: Tensor, height: float | None, divisor: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses (N,) and factor (N,) = scale · height / divisor / denominator, fp32, of logits with contiguous rows.

    height: the cap is height · tanh(z / divisor); None is no cap. gradient: overwrite the logits with the gradient
    divided by the factor.
    """
    N, V = logits_NV.shape
    assert logits_NV.stride(1) == 1
    losses, factor = (torch.empty(N, dtype=torch.float32, device=logits_NV.device) for _ in range(2))
    constants = {
        "CAPPED": height is not None,
        "GRADIENT": gradient,
        "BLOCK": min(BLOCK, triton.next_power_of_2(V)),
        "num_warps": 8,
    }
    loss_kernel[(N,)](
        logits_NV,
        targets_N.contiguous(),
        scale_N.contiguous(),
        losses,
        factor,
        logits_NV.stride(0),
        V,
        0.0 if height is None else height,
        1 / divisor,
        **constants,
    )
    return losses, factor


@triton.jit
def tanh(y):
    u = tl.exp(-2 * tl.abs(y))  # at most 1, whatever y
    t = (1 - u) / (1 + u)
    return tl.where(y < 0, -t, t)


@triton.jit
def loss_kernel(
    logits, targets, scale, losses, factor, row_stride, V, height, slope,
    CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. The target's own gradient is written last, when the denominator is known.

    Barriers order its load and its store around those of the row, which other threads may do. Excluding it from the
    row's mask instead would split the wide stores.
    """
    row = tl.program_id(0)
    logits += tl.cast(row, tl.int64) * row_stride
    target = tl.load(targets + row)
    z = tl.load(logits + target).to(tl.float32)
    tl.debug_barrier()
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if CAPPED:
        t = tanh(z * slope)
        score = height * t
        steepness = 1 - t * t
        top = 0.0
        for start in range(0, V, BLOCK):
            at = start + columns
            capped = tanh(tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32) * slope)
            e = tl.exp(height * capped)
            total += tl.where(at < V, e, 0.0)
            if GRADIENT:
                grad = e * (1 - capped * capped)
                tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < V)
        denominator = tl.sum(total, 0)
    else:
        score = z
        steepness = 1.0
        peak = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            at = start + columns
            part = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
            raised = tl.maximum(peak, part)
            shift = tl.where(raised == float("-inf"), 0.0, raised)  # a place that has seen no logit yet
            total = total * tl.exp(peak - shift) + tl.exp(part - shift)
            peak = raised
        top = tl.max(peak, 0)
        denominator = tl.sum(total * tl.exp(peak - top), 0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                at = start + columns
                part = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32)
                e = tl.exp(part - top)
                tl.store(logits + at, e.to(logits.dtype.element_ty), mask=at < V)
    if GRADIENT:
        tl.debug_barrier()
        grad = (tl.exp(score - top) - denominator) * steepness
        tl.store(logits + target, grad.to(logits.dtype.element_ty))
    ratio = height * slope if CAPPED else 1.0
    tl.store(losses + row, tl.log(denominator) - (score - top))
    tl.store(factor + row, tl.load(scale + row) * ratio / denominator)
