"""The default dtype of training: bf16 on accelerators, and on CPUs where a probe measures it to be clearly faster.

The probe times the products that dominate a step: one of a feed-forward layer and its two gradients. They are large
enough to use all threads. A product of 512 × 512 takes half a millisecond on one thread, about as long as its start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import anywhere, make_mesh, place
from quern.grug.product import product

ROWS, TOKENS, WIDTH, CHANNELS = 8, 256, 256, 1024
ROUNDS = 7
CLEARLY = 1.2
"""bf16 must be this many times as fast: below that the rest of a step, mostly in fp32, decides."""


def choose_dtype(dtype: str | None) -> str:
    """Returns "float32" or "bfloat16", the same on all processes. dtype: "fp32", "bf16" or None (choose)."""
    if dtype is not None:
        return {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    if jax.default_backend() != "cpu":
        return "bfloat16"
    rates = probe(jax.local_devices()[0])
    return "bfloat16" if anywhere(is_faster(rates["bfloat16"], rates["float32"])) else "float32"


def is_faster(narrow: Sequence[float], wide: Sequence[float]) -> bool:
    """Returns whether the median ratio of the rates, bf16 to fp32, is above CLEARLY.

    The ratio is taken within each round: a busy machine slows both of a round, and the median ignores an odd round.
    """
    return median(a / b for a, b in zip(narrow, wide, strict=True)) > CLEARLY


def probe(device: Any) -> dict[str, list[float]]:
    """Measures FLOP/s of both dtypes on one device, alternately; returns a list with one value per round for each."""
    mesh = make_mesh(devices=[device])
    rates: dict[str, list[float]] = {"bfloat16": [], "float32": []}
    with jax.set_mesh(mesh):
        shapes = (ROWS, TOKENS, WIDTH), (CHANNELS, WIDTH)
        ones = [place(np.ones(shape, np.float32), P(*(None for _ in shape)), mesh) for shape in shapes]
        inputs = {dtype: [x.astype(dtype) for x in ones] for dtype in rates}
        for dtype in rates:
            jax.block_until_ready(_layer(*inputs[dtype]))
        for _ in range(ROUNDS):
            for dtype, taken in rates.items():
                start = time.perf_counter()
                jax.block_until_ready(_layer(*inputs[dtype]))
                taken.append(3 * 2 * ROWS * TOKENS * WIDTH * CHANNELS / (time.perf_counter() - start))
    return rates


@jax.jit
def _layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y, pull = jax.vjp(lambda x, weight: product("btd,fd->btf", x, weight, P(None, None, None)), x, weight)
    return y, pull(y)
