"""Trains recipes of the JAX twin for studies, on one device, with the loop of `quern grug train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from quern.grug.mesh import make_mesh, use_device
from quern.grug.state import step_config
from quern.lab.trainer import Note, Ready, Trainer
from quern.machine import Machine
from quern.recipe import Recipe, Resolved
from quern.resolve import resolve
from quern.stages.jax.backend import JaxBackend, processes
from quern.stages.jax.train import core_of, count, fresh_run, make_plan, refuse_dropout, validate_run
from quern.stages.prepare import Prepared


class JaxTrainer(Trainer):
    """See `Trainer`. Steps compile once for all trials of one length: the rates of a recipe are constants of a step."""

    def __init__(self, out: Path, machine: Machine, log: Callable[[str], None]) -> None:
        super().__init__(out, machine, log)
        use_device(machine.device.type, machine.threads)
        self._mesh = make_mesh(devices=jax.devices()[:1])

    def check(self, recipe: Recipe) -> None:
        resolved = resolve(recipe)
        refuse_dropout(resolved)
        with jax.set_mesh(self._mesh):
            count(step_config(resolved, "float32", core_of(recipe)))  # shapes, which are those of any dtype

    @contextmanager
    def _ready(self, recipe: Resolved, prepared: Prepared, every: int, note: Note) -> Iterator[Ready]:
        cfg = step_config(recipe, str(self.machine.dtype).removeprefix("torch."), core_of(recipe))
        with jax.set_mesh(self._mesh):
            run = fresh_run(recipe, cfg, self._mesh)
            validated = every, lambda run: note(run, validate_run(run, recipe, prepared, self._mesh))
            yield JaxBackend(run, processes()), make_plan(recipe, cfg, [validated]), count(cfg)
