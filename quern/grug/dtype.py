"""Which dtype to train in when nobody says: bf16 on accelerators, and on CPUs where it is measured to be faster.

The probe runs what most of a step consists of, the three products of a feed-forward layer and its gradients, at a size
that all threads have a share in. A product of 512 × 512 would not do: it takes half a millisecond, one thread, and as
long to start as to compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import anywhere, make_mesh, place

ROWS, TOKENS, WIDTH, CHANNELS = 8, 256, 256, 1024
ROUNDS = 7
CLEARLY = 1.2
"""bf16 must be this many times as fast: below it the rest of a step, most of it in fp32, decides."""


def choose_dtype(dtype: str | None) -> str:
    """ "float32" or "bfloat16": as asked for ("fp32", "bf16"), else bf16 on accelerators and where a CPU computes it
    clearly faster. Of several processes all choose the same."""
    if dtype is not None:
        return {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    if jax.default_backend() != "cpu":
        return "bfloat16"
    rates = probe(jax.local_devices()[0])
    return "bfloat16" if anywhere(is_faster(rates["bfloat16"], rates["float32"])) else "float32"


def is_faster(narrow: Sequence[float], wide: Sequence[float]) -> bool:
    """Whether the rates of bf16 are clearly above those of fp32, round by round: a busy machine slows both of a round,
    and one odd round decides nothing."""
    return median(a / b for a, b in zip(narrow, wide, strict=True)) > CLEARLY


def probe(device: Any) -> dict[str, list[float]]:
    """dtype → FLOP/s on one device, in each round, the dtypes in turns."""
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
    """A product and its two gradients."""
    y, pull = jax.vjp(lambda x, weight: product("btd,fd->btf", x, weight, P(None, None, None)), x, weight)
    return y, pull(y)


def product(subscripts: str, x: jax.Array, y: jax.Array, spec: P, dtype: Any = None) -> jax.Array:
    """einsum(subscripts, x, y), cut as `spec` says, in `dtype` (default: x's).

    Each letter must stand in at least two of the three terms, so that the gradients are einsums of the same letters.
    """
    return cast(jax.Array, _product(subscripts, x, y, spec, dtype or x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _product(subscripts: str, x: jax.Array, y: jax.Array, spec: P, dtype: Any) -> jax.Array:
    wide = jnp.einsum(subscripts, x, y, out_sharding=spec, preferred_element_type=jnp.float32)
    return wide.astype(dtype)


def _forward(subscripts: str, x: jax.Array, y: jax.Array, spec: P, dtype: Any) -> tuple[jax.Array, Any]:
    return _product(subscripts, x, y, spec, dtype), (x, y)  # pyright: ignore[reportReturnType]


def _backward(subscripts: str, spec: P, dtype: Any, kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = kept
    inputs, _, output = subscripts.partition("->")
    first, _, second = inputs.partition(",")
    g = g.astype(x.dtype)
    dx = product(f"{output},{second}->{first}", g, y, jax.typeof(x).sharding.spec)
    cut = jax.typeof(y).sharding.spec
    if y.ndim != 2 or g.size <= x.size:
        return dx, product(f"{output},{first}->{second}", g, x, cut)
    # XLA turns the first operand of a product that is summed over rows and tokens: let it be the smaller one.
    turned = product(f"{first},{output}->{second[::-1]}", x, g, P(cut[1], cut[0]))
    return dx, turned.T


_product.defvjp(_forward, _backward)
