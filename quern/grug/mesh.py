"""The device mesh: its four axes, and which of them an array is cut along. The one place that makes and checks it.

    replica_dcn   copies of the model on groups of machines between which the network is slow
    replica       copies of the model within a group
    data          rows of the batch; parameters and optimizer state at rest are cut along it too (ZeRO-3)
    model         heads, feed-forward channels and vocabulary (tensor parallel)

Every axis is explicit (`AxisType.Explicit`): the type of an array says how it is cut, and an operation whose result
could be cut in more than one way has to say which. On one device every axis has size 1 and nothing else changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from quern.recipe import ModelRecipe

AnyMesh = Mesh | AbstractMesh
"""Of devices, or while tracing of their axes only."""
AXES = ("replica_dcn", "replica", "data", "model")
BATCH = ("replica_dcn", "replica", "data")
"""The axes that rows of a batch are spread over, together."""


def make_mesh(
    *,
    replica_dcn: int = 1,
    replica: int = 1,
    data: int | None = None,
    model: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over all devices of all processes, or over those given; data None takes what the others leave.

    Raises ValueError, saying what would fit, when the sizes do not multiply to the number of devices.
    """
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


def check_fits(cfg: ModelRecipe, mesh: Mesh, batch_rows: int) -> None:
    """Raises ValueError unless heads divide by the model axis, and rows (of each micro-batch) by the batch's axes."""
    assert cfg.heads and cfg.kv_heads
    cuts, model = batch_shards(mesh), mesh.shape["model"]
    for name, count in (("heads", cfg.heads), ("kv_heads", cfg.kv_heads)):
        if count % model:
            raise ValueError(
                f"{count} {name} cannot be spread over a model axis of {model}: use one of {_divisors(count)}"
            )
    if batch_rows % cuts:
        raise ValueError(
            f"{batch_rows} rows at a time cannot be spread over {cuts} parts of the batch ({' x '.join(BATCH)}): "
            f"use a multiple of {cuts} (rows = train.micro-batch-tokens / model.context), or fewer devices there"
        )


def batch_shards(mesh: Mesh) -> int:
    """In how many parts a batch is cut."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def fit(size: int, axes: str | tuple[str, ...], mesh: AnyMesh) -> str | tuple[str, ...] | None:
    """The axes, if they cut a dim of this size evenly; None (the dim stays whole) if not."""
    names = (axes,) if isinstance(axes, str) else axes
    return axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None


def place(array: np.ndarray, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """A host array, the same in every process, as one array cut over the mesh; each process moves its own parts."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def join_processes(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Makes this one of several processes with one mesh; call it before anything else of JAX.

    coordinator: "host:port" of process 0. What is None is taken from the scheduler's environment (Slurm, Open MPI,
    Kubernetes, TPU pods), where JAX finds it itself. Raises ValueError when nothing says how many there are.
    """
    try:
        jax.distributed.initialize(coordinator, processes, process_id)
    except ValueError as error:
        raise ValueError(f"cannot join the other processes ({error}): give coordinator, processes and id") from error


def wait_for_all(point: str) -> None:
    """Returns when every process has come to this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(point)


def same_everywhere(name: str) -> str:
    """Process 0's name, in every process; names must be ASCII of one length."""
    if jax.process_count() == 1:
        return name
    return bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(name.encode(), np.uint8)).tolist()).decode()


def anywhere(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of malloc.h; a threshold of -1 is: never


def keep_freed_memory() -> None:
    """For the whole process; call it before JAX starts its threads. On other C libraries it does nothing."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for setting, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            libc.mallopt(setting, value)
