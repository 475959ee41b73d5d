"""What a shape costs: FLOPs per token, and the devices' own matmul peak; as the PyTorch side counts them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from quern.grug.mesh import make_mesh, place
from quern.grug.model import layout
from quern.grug.optim import group_of
from quern.recipe import ModelRecipe


def flops_per_token(cfg: ModelRecipe, mesh: Mesh) -> int:
    """6 per parameter of the matrices and the head, and 12 · heads · head_dim · span for each layer's attention."""
    assert cfg.heads and cfg.head_dim and cfg.context
    shapes = layout(cfg, mesh)
    pairs = zip(jax.tree.leaves(group_of(shapes)), jax.tree.leaves(shapes), strict=True)
    multiplied = sum(shape.size for group, shape in pairs if group in ("matrices", "head"))
    spans = [min(window or cfg.context, cfg.context) for window in cfg.window_sizes()]
    return 6 * multiplied + sum(12 * cfg.heads * cfg.head_dim * span for span in spans)


def measure_peak_flops(dtype: str, mesh: Mesh) -> float:
    """FLOP/s of all devices of the mesh: the best of a few large square products on one of them, times their number.

    On a CPU that is split into several devices these share one processor, and count as one.
    """
    device = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    devices = jax.process_count() if device.platform == "cpu" else mesh.devices.size
    return devices * matmul_flops(dtype, device, 2048, 8)


def matmul_flops(dtype: str, device: Any, size: int, repeats: int) -> float:
    """FLOP/s of the fastest of a few products of two (size, size) matrices, accumulated in fp32, on one device alone,
    whatever mesh is set."""
    mesh = make_mesh(devices=[device])
    with jax.set_mesh(mesh):
        a = place(np.ones((size, size), np.float32), P(None, None), mesh).astype(dtype)
        product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
        product(a, a).block_until_ready()
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            product(a, a).block_until_ready()
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
