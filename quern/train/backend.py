"""`Backend`: the state that the training loop changes, and how: PyTorch here, JAX in stages/jax/backend.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from quern.data.batch import Batch
from quern.machine import Machine
from quern.mesh import Mesh
from quern.model.count import Flops
from quern.optim.schedule import Multipliers
from quern.parallel.sharding import Slice
from quern.train.state import Counters, TrainState, refuse_unequal_replicas
from quern.train.step import DeviceBatch, StepResult, send_batch, train_on

Evaluator = Callable[[Any], dict[str, Any]]
"""Takes the state, which holds the counters too, and returns values for the log."""
Told = list[list[float]]
"""The numbers that each rank told the others with a step, in rank order."""


class Backend(Protocol):
    """A run's state, and the functions that change it. Each rank takes its part of a batch, by `mesh.data`."""

    @property
    def run(self) -> Counters: ...

    @property
    def mesh(self) -> Mesh: ...

    # Checks what must hold before the first step.
    def begin(self) -> None: ...

    # Starts to send this rank's part of a batch to the device, for passes of so many rows.
    def send(self, batch: Batch, rows: int, flops: Flops) -> Any: ...

    # Takes one step, counts it in `run`, and tells the other ranks, if there are any, some numbers beside it.
    def step(self, sent: Any, multipliers: Multipliers, tell: Sequence[float]) -> tuple[StepResult, Told]: ...

    # Runs an evaluator, without dropout.
    def evaluate(self, evaluator: Evaluator) -> dict[str, Any]: ...

    # Returns this rank's slices of the state, for each file that it writes; on the host if they are copied.
    def save(self, copied: bool) -> list[dict[str, Slice]]: ...

    # Puts the state where a checkpoint left it. Raises an error of Python for one that does not fit.
    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None: ...


@dataclass
class TorchBackend:
    """A state of PyTorch on a machine. seed: for a model's draws in a step (dropout)."""

    run: TrainState
    machine: Machine
    clip_norm: float | None = None
    seed: int = 0

    @property
    def mesh(self) -> Mesh:
        return self.run.optimizer.mesh

    def begin(self) -> None:
        refuse_unequal_replicas(self.run)

    def send(self, batch: Batch, rows: int, flops: Flops) -> DeviceBatch:
        return send_batch(batch, self.mesh, self.machine, rows, flops)

    def step(self, sent: DeviceBatch, multipliers: Multipliers, tell: Sequence[float]) -> tuple[StepResult, Told]:
        heard = self._tell(tell)
        # A resumed run draws what the uninterrupted one would. Mixed: a CPU reads 32 bits of the seed.
        facts = self.seed, self.run.step, self.mesh.data.rank
        torch.manual_seed(int(np.random.SeedSequence(facts).generate_state(1)[0]))
        result = train_on(self.run, sent, multipliers, self.machine, self.clip_norm)
        return result, heard()  # the step's wait for the device covers the exchange

    def _tell(self, tell: Sequence[float]) -> Callable[[], Told]:
        if self.mesh.world.size == 1:
            return list
        own = self.machine.send(torch.tensor(tell, dtype=torch.float64))
        heard = own.new_empty(len(tell) * self.mesh.world.size)
        self.mesh.world.all_gather(heard, own).wait()
        return self.machine.read_later(heard.view(self.mesh.world.size, -1))

    def evaluate(self, evaluator: Evaluator) -> dict[str, Any]:
        self.run.model.eval()
        try:
            return evaluator(self.run)
        finally:
            self.run.model.train()

    def save(self, copied: bool) -> list[dict[str, Slice]]:
        slices = {name: part for name, part in self.run.slices().items() if part.saved}
        for name, part in slices.items() if copied else ():
            slices[name] = replace(part, tensor=part.tensor.detach().to("cpu", copy=True))
        return [slices]

    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        self.run.restore(tensors, meta)
