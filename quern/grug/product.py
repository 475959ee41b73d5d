"""The one product: an einsum of two arrays that accumulates in fp32, whose gradients are such products too.

Asked for an fp32 result, a product of bf16 arrays runs on a processor's matrix units: on a CPU with AMX ten times as
fast as one that is asked for bf16, which XLA computes in fp32. Autodiff would multiply fp32 gradients with bf16
arrays, hence the rule of our own. In fp32 nothing differs from `jnp.einsum`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


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
