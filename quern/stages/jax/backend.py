"""The training loop's backend in JAX: grug's steps, and its state in the checkpoints' one format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import Mesh as Devices
from jax.sharding import PartitionSpec as P

from quern.data.batch import Batch
from quern.grug.mesh import gather, place
from quern.grug.state import JaxTrainState, StepConfig, device_batch, train_step
from quern.mesh import Mesh, ProcessGroup, alone
from quern.model.count import Flops
from quern.optim.schedule import Multipliers
from quern.parallel.sharding import Slice
from quern.train.state import Counters, refuse_other_shapes
from quern.train.step import Evaluator, StepResult, Told

Tensors = Mapping[str, torch.Tensor | np.ndarray]  # by name


class Processes(ProcessGroup):
    """JAX's processes. Values pass through its collectives."""

    def gather_objects(self, value: Any) -> list[Any]:
        return gather(value)

    def broadcast_object(self, value: Any) -> Any:
        return gather(value)[0]


def processes() -> Mesh:
    """JAX's processes as ranks that take whole batches."""
    rank, size = jax.process_index(), jax.process_count()
    return replace(alone(), rank=rank, world=Processes("world", size, rank))


@dataclass
class JaxRun(Counters):
    """The state of a run in JAX. devices: the mesh that holds the arrays."""

    arrays: JaxTrainState
    cfg: StepConfig
    devices: Devices


@dataclass
class JaxBackend:
    """A state of JAX, on the current mesh of devices."""

    run: JaxRun
    mesh: Mesh

    def begin(self) -> None:
        pass

    def send(self, batch: Batch, rows: int, flops: Flops) -> tuple[Any, int, int, Flops]:
        return device_batch(batch, rows, self.run.devices), int(batch.mask.sum()), batch.tokens.size, flops

    def step(
        self, sent: tuple[Any, int, int, Flops], multipliers: Multipliers, tell: Sequence[float]
    ) -> tuple[StepResult, Told]:
        (batch, tokens, positions, flops), run, heard = sent, self.run, list[list[float]]()
        if self.mesh.world.size > 1:
            heard = multihost_utils.process_allgather(np.asarray(tell, np.float32)).tolist()
        run.arrays, found = train_step(run.arrays, batch, multipliers, run.cfg)
        loss, norm = float(found["loss"]), float(found["grad_norm"])  # waits until the step is done
        run.step += 1
        run.tokens += tokens
        verdict = run.guard.observe(bool(np.isfinite(loss) and np.isfinite(norm)))
        return StepResult(loss, norm, tokens, positions, flops, verdict), heard

    def evaluate(self, evaluator: Evaluator) -> dict[str, Any]:
        return evaluator(self.run)

    def save(self) -> list[dict[str, Slice]]:
        """A device's shards have a file of their own."""
        parts: dict[Any, dict[str, Slice]] = {device: {} for device in jax.local_devices()}
        for path, array in jax.tree_util.tree_leaves_with_path(self.run.arrays):
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    begin = tuple(part.start or 0 for part in shard.index)
                    tensor = torch.from_numpy(np.array(shard.data))
                    parts[shard.device][name_of(path)] = Slice(tensor, begin, array.shape)
        return list(parts.values())

    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        self.run.arrays = arrays_of(known(tensors), self.run.arrays, self.run.devices)
        self.run.count_from(meta)


def name_of(path: Any) -> str:
    """The name of a leaf in a checkpoint, such as params.blocks.0.query."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def known(tensors: Tensors) -> Tensors:
    """Returns the tensors of a checkpoint without the random key that earlier versions saved and nothing read."""
    return {name: one for name, one in tensors.items() if name != "rng"}


def arrays_of(tensors: Tensors, like: Any, devices: Devices, name_of: Callable[[Any], str] = name_of) -> Any:
    """Places whole tensors, by name, on a mesh, `like` a pytree of arrays or `jax.ShapeDtypeStruct`. Raises as
    `refuse_other_shapes`."""
    refuse_other_shapes({name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(like)}, tensors)

    def one(path: Any, leaf: Any) -> jax.Array:
        spec = P() if leaf.sharding is None else leaf.sharding.spec  # tracing omits that of replicated arrays
        return place(np.asarray(tensors[name_of(path)], dtype=leaf.dtype), spec, devices)

    return jax.tree_util.tree_map_with_path(one, like)
