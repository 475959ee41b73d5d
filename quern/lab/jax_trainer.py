"""Trains recipes of the JAX twin for studies, on one device, with the loop of `quern grug train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from quern.grug.evaluate import group_sizes
from quern.grug.mesh import keep_freed_memory, make_mesh, use_cpu
from quern.grug.state import step_config
from quern.lab.trainer import Note, Trainer
from quern.machine import Machine
from quern.model.base import KINDS
from quern.model.count import Parameters, of_kinds
from quern.recipe import Resolved
from quern.records import Records
from quern.runs.training import make_batches
from quern.stages.jax.backend import JaxBackend, JaxRun, processes
from quern.stages.jax.train import core_of, fresh_run, make_plan, validate_run
from quern.stages.prepare import Prepared
from quern.train import loop
from quern.train.state import Counters


class JaxTrainer(Trainer):
    """See `Trainer`. Steps compile once for all trials of one length: the rates of a recipe are constants of a step."""

    def __init__(self, out: Path, machine: Machine) -> None:
        super().__init__(out, machine)
        keep_freed_memory()
        if machine.device.type == "cpu":
            use_cpu(machine.threads)
        self._mesh = make_mesh(devices=jax.devices()[:1])

    def _run(
        self, recipe: Resolved, prepared: Prepared, every: int, note: Note, on_step: Callable[[int, float], None]
    ) -> tuple[int, Counters, Parameters]:
        cfg = step_config(recipe, str(self.machine.dtype).removeprefix("torch."), core_of(recipe))

        def evaluate(run: JaxRun) -> dict[str, Any]:
            return note(run, validate_run(run, recipe, prepared, self._mesh))

        with jax.set_mesh(self._mesh):
            kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
            for group, size in group_sizes(cfg).items():
                kinds[group if group in KINDS else "scalars"] += size
            run, plan = fresh_run(recipe, cfg, self._mesh), make_plan(recipe, cfg, [(every, evaluate)])
            plan = replace(plan, save_every=None)
            batches, folder = make_batches(recipe, prepared.train), Records(self.out)
            backend, advance = JaxBackend(run, processes()), lambda *step: on_step(run.step, run.seconds)
            code = loop.train(backend, batches, plan, folder, self.log, advance, "", more_follows=True)
        return code, run, of_kinds(kinds)
