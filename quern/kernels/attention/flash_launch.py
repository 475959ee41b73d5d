"""Launches flash attention's Triton kernels: arguments, grids, descriptors, and the choice of tile sizes.

Tile sizes: on a GPU the first call with a class of shapes (head dim, dtype, bounded or not, length to within a factor
of four) times its candidates. A trial runs the kernel into the real outputs, which is harmless:
every run writes all of them and reads none, and the chosen candidate runs last. Triton stores the choice on disk with
the compiled kernels, so that a run resumed on the same machine computes the same bits.

Bulk copies (TMA): from compute capability 9.0 on, the copy engine fetches tiles through descriptors, where base and
strides are multiples of 16 bytes. This saves a third of the registers and the address arithmetic in the loops.

In Triton's interpreter (tensors on the CPU) tiles are small and nothing is tuned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quern.kernels.attention.flash_triton import (
    forward_kernel,
    key_gradients_kernel,
    query_gradient_kernel,
    statistics_kernel,
)

QUERIES, KEYS = "BLOCK_M", "BLOCK_N"  # the kernels' names for the two sizes of a tile
KERNELS: dict[str, Any] = {
    "forward": forward_kernel,
    "statistics": statistics_kernel,
    "query_gradient": query_gradient_kernel,
    "key_gradients": key_gradients_kernel,
}
OWN_TILE = {"forward": QUERIES, "query_gradient": QUERIES, "key_gradients": KEYS}  # the tile that one program computes
READ_IN_TILES = {
    "forward": {"q": QUERIES, "k": KEYS, "v": KEYS},
    "query_gradient": {"q": QUERIES, "grad": QUERIES, "k": KEYS, "v": KEYS},
    "key_gradients": {"q": QUERIES, "grad": QUERIES, "lse_log2": QUERIES, "sums": QUERIES, "k": KEYS, "v": KEYS},
}
INTERPRETED_TILES = {  # unequal, so that tiles begin within tiles; the long one is what a program computes
    "forward": {QUERIES: 64, KEYS: 32},
    "query_gradient": {QUERIES: 64, KEYS: 32},
    "key_gradients": {QUERIES: 32, KEYS: 64},
}
LOG2_E = 1 / math.log(2)


def forward(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, first_BT: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns y (B, T, H, E) and the log-sum-exp (B, H, T) fp32. first_BT: where each token's document begins."""
    B, T, H, _ = q_BTHE.shape
    y_BTHE = torch.empty(q_BTHE.shape, dtype=q_BTHE.dtype, device=q_BTHE.device)
    lse_BHT = torch.empty((B, H, T), dtype=torch.float32, device=q_BTHE.device)
    tensors = {"q": q_BTHE, "k": k_BTKE, "v": v_BTKE, "y": y_BTHE}
    others = {"lse": lse_BHT, "first": first_BT, "H": H, "scale_log2": scale * LOG2_E}
    _launch("forward", B * H, tensors, others, window, first_BT is not None)
    return y_BTHE, lse_BHT


def backward(
    grad_BTHE: Tensor,
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    y_BTHE: Tensor,
    lse_BHT: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv in the inputs' shapes and dtypes. first_BT, last_BT: from `document_bounds`."""
    B, T, H, E = q_BTHE.shape
    K = k_BTKE.size(2)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_BTHE, k_BTKE, v_BTKE))
    padded = -(-T // LONGEST_TILE) * LONGEST_TILE
    lse_log2, sums = (torch.empty((B, H, padded), dtype=torch.float32, device=q_BTHE.device) for _ in range(2))
    strides = y_BTHE.stride()[:3], grad_BTHE.stride()[:3]
    KERNELS["statistics"][(padded // 64 * B * H,)](
        y_BTHE, grad_BTHE, lse_BHT, lse_log2, sums, *strides, H, T, padded, E=E, BLOCK_M=64
    )
    tensors = {"q": q_BTHE, "k": k_BTKE, "v": v_BTKE, "grad": grad_BTHE}
    others = {"lse_log2": lse_log2, "sums": sums, "padded": padded, "scale": scale, "scale_log2": scale * LOG2_E}
    packed = first_BT is not None
    _launch("query_gradient", B * H, tensors | {"dq": dq}, others | {"first": first_BT, "H": H}, window, packed)
    _launch("key_gradients", B * K, tensors | {"dk": dk, "dv": dv}, others | {"last": last_BT, "K": K}, window, packed)
    return dq, dk, dv


def _launch(
    name: str, pairs: int, tensors: dict[str, Tensor], others: dict[str, Any], window: int, packed: bool
) -> None:
    """Runs one kernel over `pairs` of batch and head. tensors: the arguments of shape (B, T, heads, E)."""
    _, T, H, E = tensors["q"].shape
    arguments = {
        **tensors,
        **{f"{key}_strides": x.stride()[:3] for key, x in tensors.items()},
        **others,
        "T": T,
        "window": min(window, T) or T,
        "length_class": (T > 512) + (T > 2048) + (T > 8192),
        "GROUPS": H // tensors["k"].size(2),
        "E": E,
        "BOUNDED": packed or 0 < window < T,
        "PRECISION": "ieee",  # only fp32 has a choice: all its bits, or the tensor cores' 10
    }

    def grid(meta: Any) -> tuple[Any]:
        return (triton.cdiv(T, meta[OWN_TILE[name]]) * pairs,)

    device = tensors["q"].device
    tma = can_describe([arguments[key] for key in READ_IN_TILES[name]])
    if device.type == "cpu":
        arguments |= INTERPRETED_TILES[name] | {"TMA": tma}
        KERNELS[name][grid](**arguments | {key: make(arguments) for key, make in _descriptors(name).items()})
    else:
        tma = tma and torch.cuda.get_device_capability(device) >= (9, 0)
        _tuned(name, E, tensors["q"].element_size(), tma, device)[grid](**arguments)


def can_describe(tensors: list[Tensor]) -> bool:
    """Whether the copy engine can read the tensors: 16-byte aligned, with heads inside tokens."""
    return all(
        x.data_ptr() % 16 == 0
        and (x.dim() < 4 or all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3]))
        and (x.dim() < 4 or x.stride(1) >= x.stride(2) * (x.size(2) - 1) + x.size(3))
        for x in tensors
    )


def describe(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` tokens of one head of (B, T, heads, E); for a contiguous (B, H, padded), of the flat tensor."""
    if x.dim() < 4:
        return TensorDescriptor(x, [x.numel()], [1], [rows])
    B, T, heads, E = x.shape
    columns = x.stride(2) * (heads - 1) + E
    return TensorDescriptor(x, [B, T, columns], [x.stride(0), x.stride(1), 1], [1, rows, E])


def _descriptors(name: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Makes the descriptor of each argument that is read in tiles or, without TMA, returns the tensor."""

    def make(key: str, rows: str, arguments: dict[str, Any]) -> Any:
        return describe(arguments[key], arguments[rows]) if arguments["TMA"] else arguments[key]

    return {key: partial(make, key, rows) for key, rows in READ_IN_TILES[name].items()}


@cache
def _tuned(name: str, E: int, element_bytes: int, tma: bool, device: torch.device) -> Any:
    """The autotuned kernel for one kind of input on one device."""
    configs = [
        triton.Config({QUERIES: t.queries, KEYS: t.keys, "TMA": tma}, num_warps=t.warps, num_stages=t.stages)
        for t in candidates(name, E, element_bytes, tma)
    ]
    described = triton.heuristics(_descriptors(name))(KERNELS[name])
    return triton.autotune(configs, key=["E", "BOUNDED", "length_class"], cache_results=True)(described)


# Candidates of tile sizes ----------------------------------------------------------------------------------
#
# They follow from compiled code, not from timings: compiled for sm_80 and sm_90 they spill few registers or none, and
# with descriptors the matrix instructions are asynchronous (tests/kernels/test_gpu_code.py). The second reason is
# arithmetic: head dim 128 in bf16 does 64 floating-point operations per byte of keys and values when a tile has 64
# queries, and 128 when it has 128; Hopper needs the latter, or its level-2 cache is the limit.

LONGEST_TILE = 128


class Tiles(NamedTuple):
    """Queries × keys, the warps of a tile, and the stages of the software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel and largest head dim; the likeliest first, the last ones small enough for any GPU.
Table = dict[str, dict[int, list[Tiles]]]
WITH_DESCRIPTORS: Table = {
    "forward": {
        64: [Tiles(128, 128, 8, 2), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3)],
        128: [Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2)],
        256: [Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 8, 1)],
    },
    "query_gradient": {
        64: [Tiles(128, 128, 8, 2), Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 3)],
        128: [Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)],
        256: [Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 16, 4, 2)],
    },
    "key_gradients": {
        64: [Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 2)],
        128: [Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 2)],
        256: [Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(16, 64, 8, 2)],
    },
}
WITH_POINTERS: Table = {
    "forward": {
        64: [Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)],
        128: [Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)],
        256: [Tiles(64, 32, 4, 2)],
    },
    "query_gradient": {
        64: [Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)],
        128: [Tiles(128, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2)],
        256: [Tiles(64, 32, 8, 2), Tiles(64, 16, 4, 2)],
    },
    "key_gradients": {
        64: [Tiles(64, 128, 8, 2), Tiles(64, 64, 8, 2), Tiles(32, 64, 4, 2)],
        128: [Tiles(32, 128, 8, 2), Tiles(64, 64, 8, 1), Tiles(32, 64, 8, 2)],
        256: [Tiles(32, 32, 8, 1)],
    },
}
# Single precision is for checking: its products run without tensor cores, which would drop bits.
SINGLE = [Tiles(16, 16, 4, 1)]


def candidates(kernel: str, E: int, element_bytes: int, descriptors: bool) -> list[Tiles]:
    """The tiles to time, the likeliest first. Triton passes over those that do not fit into the GPU's shared memory."""
    if element_bytes == 4:
        return SINGLE
    table = (WITH_DESCRIPTORS if descriptors else WITH_POINTERS)[kernel]
    return table[min(limit for limit in table if limit >= E)]
