"""alpha · X Xᵀ + beta · A in Triton, one triangle of blocks; see symmetric.py.

A program computes the block (i, j) with j ≤ i of one matrix and stores it twice, the second time transposed as the
block (j, i). Programs are numbered along the triangle, so that each has work. Blocks on the diagonal are computed
whole, and the lower half is stored for both: not every machine sums the two halves in the same order.

The file imports Triton, so the first call imports it.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILES = ((128, 64, 4, 8), (128, 64, 3, 8), (128, 32, 4, 4), (64, 64, 4, 4), (64, 128, 3, 4))
"""Candidates: rows (and columns) of a block of the result, columns of X per step, stages, warps."""
INTERPRETED = {"BLOCK": 32, "BLOCK_K": 16}


def product(x_NRC: Tensor, a_NRR: Tensor | None, beta: float, alpha: float) -> Tensor:
    """(N, R, C) and (N, R, R) or None → (N, R, R), contiguous. Either may be a transposed view."""
    N, R, C = x_NRC.shape
    y_NRR = torch.empty((N, R, R), dtype=x_NRC.dtype, device=x_NRC.device)
    tensors = {"x": x_NRC, "x_strides": x_NRC.stride(), "a": a_NRR, "a_strides": (0, 0, 0), "y": y_NRR}
    if a_NRR is not None:
        tensors["a_strides"] = a_NRR.stride()

    def grid(meta: dict[str, Any]) -> tuple[Any, int]:
        blocks = triton.cdiv(R, meta["BLOCK"])
        return blocks * (blocks + 1) // 2, N

    arguments = {**tensors, "R": R, "C": C, "alpha": alpha, "beta": beta, "PRECISION": "ieee"}
    if x_NRC.device.type == "cpu":
        kernel: Any = product_kernel
        kernel[grid](**arguments, **INTERPRETED)
    else:
        _tuned()[grid](**arguments)
    return y_NRR


@cache
def _tuned() -> Any:
    configs = [
        triton.Config({"BLOCK": block, "BLOCK_K": step}, num_stages=stages, num_warps=warps)
        for block, step, stages, warps in TILES
    ]
    return triton.autotune(configs, key=["R", "C"])(product_kernel)


@triton.jit
def load_block(x, strides, first_row, first_column, R, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) of a matrix, zero beyond it."""
    rows = first_row + tl.arange(0, ROWS)[:, None]
    columns = first_column + tl.arange(0, COLUMNS)[None, :]
    at = x + tl.cast(rows, tl.int64) * strides[1] + tl.cast(columns, tl.int64) * strides[2]
    return tl.load(at, mask=(rows < R) & (columns < C), other=0.0)


@triton.jit
def store_block(y, tile, first_row, first_column, R, BLOCK: tl.constexpr):
    rows = first_row + tl.arange(0, BLOCK)[:, None]
    columns = first_column + tl.arange(0, BLOCK)[None, :]
    tl.store(y + tl.cast(rows, tl.int64) * R + columns, tile.to(y.dtype.element_ty), mask=(rows < R) & (columns < R))


@triton.jit
def product_kernel(
    x, x_strides, a, a_strides, y, R, C, alpha, beta,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of the lower triangle, row by row × matrices."""
    place = tl.program_id(0)
    i = ((tl.sqrt(8.0 * place + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > place, i - 1, i)  # the square root was rounded
    i = tl.where((i + 1) * (i + 2) // 2 <= place, i + 1, i)
    j = place - i * (i + 1) // 2
    matrix = tl.cast(tl.program_id(1), tl.int64)
    x += matrix * x_strides[0]
    y += matrix * R * R
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for k in range(0, C, BLOCK_K):
        left = load_block(x, x_strides, i * BLOCK, k, R, C, BLOCK, BLOCK_K)
        right = load_block(x, x_strides, j * BLOCK, k, R, C, BLOCK, BLOCK_K)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    total = total * alpha
    if a is not None:
        added = load_block(a + matrix * a_strides[0], a_strides, i * BLOCK, j * BLOCK, R, R, BLOCK, BLOCK)
        total += beta * added.to(tl.float32)
    if i == j:
        lower = tl.arange(0, BLOCK)[:, None] >= tl.arange(0, BLOCK)[None, :]
        total = tl.where(lower, total, tl.trans(total))
    store_block(y, total, i * BLOCK, j * BLOCK, R, BLOCK)
    if i != j:
        store_block(y, tl.trans(total), j * BLOCK, i * BLOCK, R, BLOCK)
