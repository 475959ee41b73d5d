"""The device mesh, products of sharded arrays, the processes that share the mesh, and their malloc settings.

docs/grug.md explains the four axes. Every axis is explicit (`AxisType.Explicit`): an array's type includes its
sharding, and an operation whose result could be sharded in several ways names one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from quern.process import to_stderr, waiting
from quern.recipe import ResolvedModel

START_SECONDS = 300
"""Seconds for which a process waits for the others to start."""
AnyMesh = Mesh | AbstractMesh
"""A mesh of devices; while tracing, a mesh of axes without devices."""
AXES = ("replica_dcn", "replica", "data", "model")
BATCH = ("replica_dcn", "replica", "data")
"""The axes that shard the rows of a batch, together."""


def make_mesh(
    *,
    replica_dcn: int = 1,
    replica: int = 1,
    data: int | None = None,
    model: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh of these sizes over some devices, by default all of all processes; data: None takes what the other
    axes leave. Raises ValueError when the sizes do not multiply to the number of devices."""
    devices = jax.devices() if devices is None else list(devices)
    others = replica_dcn * replica * model
    if min(replica_dcn, replica, model, data or 1) < 1:
        raise ValueError("every axis of the mesh needs a size of at least 1")
    if data is None:
        data = max(1, len(devices) // others)
    if others * data != len(devices):
        raise ValueError(
            f"a mesh of {replica_dcn} x {replica} x {data} x {model} ({', '.join(AXES)}) needs {others * data} "
            f"devices, there are {len(devices)}: choose sizes that multiply to {len(devices)}"
        )
    sizes = (replica_dcn, replica, data, model)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * 4, devices=devices)


def check_model_axis(cfg: ResolvedModel, mesh: AnyMesh) -> None:
    """Raises ValueError unless the model axis divides the heads and the feed-forward channels."""
    size, counts = mesh.shape["model"], {"heads": cfg.heads, "kv-heads": cfg.kv_heads, "channels": 4 * cfg.width}
    fitting = [n for n in range(1, cfg.kv_heads + 1) if not any(count % n for count in counts.values())]
    for name, count in counts.items():
        if count % size:
            raise ValueError(f"{count} {name} cannot be spread over --mesh.model {size}: use one of {fitting}")


def check_rows(mesh: Mesh, batch_rows: int) -> None:
    """Raises ValueError unless the batch's axes divide the rows of a micro-batch."""
    cuts = batch_shards(mesh)
    if batch_rows % cuts:
        raise ValueError(
            f"{batch_rows} rows at a time cannot be spread over {cuts} parts of the batch ({' x '.join(BATCH)}): "
            f"use a multiple of {cuts} (rows = train.micro-batch-tokens / model.context), or fewer devices there"
        )


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def fit(size: int, axes: str | tuple[str, ...], mesh: AnyMesh) -> str | tuple[str, ...] | None:
    """Returns the axes if they divide a dim of this size, else None: the dim is not sharded."""
    names = (axes,) if isinstance(axes, str) else axes
    return axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None


def place(array: np.ndarray, spec: P, mesh: Mesh) -> jax.Array:
    """Shards a host array over the mesh. Every process holds the same array and copies its own shards."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def join_processes(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Joins the processes that share a mesh, before any other use of JAX. JAX reads values that are None from the
    scheduler's environment (Slurm, Open MPI, Kubernetes, TPU pods); ValueError if it has none. coordinator: "host:port"
    of process 0."""
    if coordinator is not None and process_id == 0:
        try:  # JAX would crash
            socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(f"process 0 cannot listen at {coordinator} ({error}): give a free port") from error
    whom = f"{processes or 'all'} processes at {coordinator or 'the coordinator'}"

    def give_up() -> None:
        to_stderr(f"not all of {whom} met within {START_SECONDS} s: start each of them, with the same address")
        os._exit(1)

    timer = threading.Timer(START_SECONDS, give_up)  # JAX would abort the process, with a stack of C++
    timer.daemon = True
    timer.start()
    try:
        with waiting(whom, START_SECONDS):
            jax.distributed.initialize(coordinator, processes, process_id, initialization_timeout=2 * START_SECONDS)
    except ValueError as error:
        raise ValueError(
            f"cannot join the other processes ({error}): give --processes.coordinator, --processes.count and "
            "--processes.id"
        ) from error
    finally:
        timer.cancel()


def gather(value: Any) -> list[Any]:
    """Returns the JSON value of each process, in every process."""
    if jax.process_count() == 1:
        return [value]
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(own.size)).tolist()
    rows = multihost_utils.process_allgather(np.pad(own, (0, max(sizes) - own.size)))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """Runs the body on process 0, then on the others; these raise ValueError with its message if it failed there."""
    if jax.process_index() > 0:
        if problem := gather("")[0]:
            raise ValueError(problem)
        yield
        return
    try:
        yield
    except Exception as error:
        gather(str(error) or type(error).__name__)
        raise
    gather("")


M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # from malloc.h; a threshold of -1 means never


def use_device(kind: str, threads: int) -> None:
    """Makes JAX compute on "cpu" with so many threads, or on "cuda". Raises ValueError where it cannot."""
    if kind != "cpu":
        if kind == "cuda" and jax.default_backend() == "gpu":
            return
        advice = "install jax[cuda13] or jax[cuda12], or " if kind == "cuda" else ""
        raise ValueError(f"JAX cannot compute on {kind} here: {advice}give --device cpu")
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    if sys.platform == "linux":  # XLA takes a thread for each processor that it may run on when it starts
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(allowed)[:threads])
        jax.devices()
        for task in os.listdir("/proc/self/task"):  # else other trials would share these processors
            os.sched_setaffinity(int(task), allowed)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step, before JAX starts its threads (docs/grug.md has figures)."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for setting, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            libc.mallopt(setting, value)


def product(subscripts: str, x: jax.Array, y: jax.Array, spec: P, dtype: Any = None) -> jax.Array:
    """Computes einsum(subscripts, x, y), sharded by `spec`, accumulated in fp32; its dtype is x's by default. Each
    letter is in at least two of the three terms, so its gradients are einsums, too (docs/grug.md, "Products")."""
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
