"""Candidate tile sizes for flash attention's kernels on a GPU. Numbers only; `flash_launch.py` times them.

The candidates follow from compiled code, not from timings: compiled for sm_80 and sm_90 they spill few registers or
none, and with descriptors the matrix instructions are asynchronous (`test_gpu_code.py` checks this). The second
reason is arithmetic: head dim 128 in bf16 does 64 floating-point operations per byte of keys and values when a tile has
64 queries, and 128 when it has 128; Hopper needs the latter, or its level-2 cache is the limit.

Shared memory is in bytes.
"""

from __future__ import annotations

from typing import NamedTuple

QUERIES, KEYS = "BLOCK_M", "BLOCK_N"  # the kernels' names for the two sizes
LONGEST_TILE = 128
TRIED = 3  # each costs seconds of compilation per class of shapes


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


def candidates(kernel: str, E: int, element_bytes: int, descriptors: bool, shared_memory: int) -> list[Tiles]:
    """The tiles to time, the likeliest first: at most `TRIED` that fit into shared memory."""
    if element_bytes == 4:
        return SINGLE
    table = (WITH_DESCRIPTORS if descriptors else WITH_POINTERS)[kernel]
    listed = table[min(limit for limit in table if limit >= E)]
    fitting = [tiles for tiles in listed if shared_bytes(kernel, tiles, E, element_bytes, descriptors) <= shared_memory]
    return fitting[:TRIED] or listed[-1:]


def shared_bytes(kernel: str, tiles: Tiles, E: int, element_bytes: int, descriptors: bool) -> int:
    """Estimates a kernel's shared memory: two tiles per stage and, with descriptors, one or two of its own.

    Without descriptors a program's own tiles may stay in registers. Triton discards candidates that do not fit.
    """
    own, walked = (tiles.keys, tiles.queries) if kernel == "key_gradients" else (tiles.queries, tiles.keys)
    held = 0 if not descriptors else own * (1 if kernel == "forward" else 2)
    return (held + 2 * walked * tiles.stages) * E * element_bytes
