"""Matrix products whose gradients also run on matrix units; docs/grug.md has the measurements behind them."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def product(subscripts: str, x: jax.Array, y: jax.Array, spec: P, dtype: Any = None) -> jax.Array:
    """Computes einsum(subscripts, x, y), sharded by `spec`, accumulated in fp32; its dtype is x's by default.

    Each letter is in at least two of the three terms, so the gradients are einsums of the same letters.
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
    spec_y = jax.typeof(y).sharding.spec
    if y.ndim != 2 or g.size <= x.size:
        return dx, product(f"{output},{first}->{second}", g, x, spec_y)
    # XLA transposes the first operand of a product that sums over rows and tokens: pass the smaller one first.
    transposed = product(f"{first},{output}->{second[::-1]}", x, g, P(spec_y[1], spec_y[0]))
    return dx, transposed.T


_product.defvjp(_forward, _backward)
