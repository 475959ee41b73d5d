"""FLOPs of a token, the devices' peak, and the default dtype: bf16 on accelerators, and on CPUs where a probe measures
it to be clearly faster (docs/grug.md).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import gather, make_mesh, place, product
from quern.grug.state import StepConfig

ROWS, TOKENS, WIDTH, CHANNELS = 8, 256, 256, 1024
ROUNDS = 7
CLEARLY = 1.2
"""bf16 must be this many times as fast: below that the rest of a step, mostly in fp32, decides."""


def group_sizes(cfg: StepConfig) -> Counter[str]:
    """The number of parameters in each optimizer group. A mesh must be set."""
    shapes = jax.eval_shape(lambda: cfg.core.init_parameters(cfg.model, key=jax.random.key(0)))
    sizes: Counter[str] = Counter()
    jax.tree.map(lambda group, shape: sizes.update({group: shape.size}), cfg.core.group_of(shapes), shapes)
    return sizes


def flops_per_token(cfg: StepConfig) -> float:
    """FLOPs of training on one token: 6 per parameter of the matrices and the head, and 12 · heads · head_dim · span
    for the attention of each layer, whose span is the mean number of keys that a query sees. A mesh must be set."""
    shape, sizes = cfg.model, group_sizes(cfg)
    seen = np.arange(shape.context) + 1
    spans = [np.minimum(seen, window or shape.context).mean() for window in shape.window_sizes()]
    return 6 * (sizes["matrices"] + sizes["head"]) + 12 * shape.heads * shape.head_dim * float(sum(spans))


def measure_peak_flops(dtype: str, mesh: Mesh) -> float:
    """Measures the FLOP/s of the fastest of eight products of square matrices on one device, accumulated in fp32, times
    the devices. Those of a CPU count as one."""
    size = 2048
    device = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    devices, alone = jax.process_count() if device.platform == "cpu" else mesh.devices.size, make_mesh(devices=[device])
    with jax.set_mesh(alone):
        a = place(np.ones((size, size), np.float32), P(None, None), alone).astype(dtype)
        times = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
        return devices * 2 * size**3 / min([_seconds(times, a, a) for _ in range(9)][1:])  # the first one compiles


def choose_dtype(dtype: str | None) -> str:
    """Returns "float32" or "bfloat16", the same on all processes. dtype: "fp32", "bf16" or None (choose)."""
    if dtype is not None:
        return {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    if jax.default_backend() != "cpu":
        return "bfloat16"
    rates = probe(jax.local_devices()[0])
    return "bfloat16" if any(gather(is_faster(rates["bfloat16"], rates["float32"]))) else "float32"


def is_faster(narrow: Sequence[float], wide: Sequence[float]) -> bool:
    """Returns whether the median over the rounds of the ratio of the rates, bf16 to fp32, is above CLEARLY."""
    return median(a / b for a, b in zip(narrow, wide, strict=True)) > CLEARLY


def probe(device: Any) -> dict[str, list[float]]:
    """Measures FLOP/s of both dtypes on one device, alternately; returns a list with one value per round for each."""
    mesh = make_mesh(devices=[device])
    rates: dict[str, list[float]] = {"bfloat16": [], "float32": []}
    with jax.set_mesh(mesh):
        shapes = (ROWS, TOKENS, WIDTH), (CHANNELS, WIDTH)
        ones = [place(np.ones(shape, np.float32), P(*(None for _ in shape)), mesh) for shape in shapes]
        inputs = {dtype: [x.astype(dtype) for x in ones] for dtype in rates}
        for _ in range(ROUNDS + 1):
            for dtype, taken in rates.items():
                taken.append(3 * 2 * ROWS * TOKENS * WIDTH * CHANNELS / _seconds(_layer, *inputs[dtype]))
    return {dtype: taken[1:] for dtype, taken in rates.items()}  # the first round compiles


def _seconds(function: Callable[..., Any], *arguments: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


@jax.jit
def _layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y, pull = jax.vjp(lambda x, weight: product("btd,fd->btf", x, weight, P(None, None, None)), x, weight)
    return y, pull(y)
