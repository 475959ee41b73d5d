"""Trains recipes of the JAX twin for studies, on one device, with the loop of `quern grug train`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from quern.grug import train
from quern.grug.evaluate import flops_per_token, group_sizes, validate
from quern.grug.mesh import keep_freed_memory, make_mesh, use_cpu
from quern.grug.state import JaxTrainState, init_state, step_config
from quern.lab.trainer import Note, Progress, Trainer
from quern.machine import Machine
from quern.model.base import KINDS
from quern.model.count import Counts, Flops, of_kinds
from quern.recipe import Recipe
from quern.records import Nowhere
from quern.runs.training import make_batches
from quern.stages.jax.train import core_of
from quern.stages.prepare import Prepared


class JaxTrainer(Trainer):
    """See `Trainer`. Steps compile once for all trials of one length: the rates of a recipe are constants of a step."""

    def __init__(self, out: Path, machine: Machine) -> None:
        super().__init__(out, machine)
        keep_freed_memory()
        if machine.device.type == "cpu":
            use_cpu(machine.threads)
        self._mesh = make_mesh(devices=jax.devices()[:1])

    def _run(
        self, recipe: Recipe, prepared: Prepared, every: int, note: Note, on_step: Callable[[int, float], None]
    ) -> tuple[int, Progress, Counts]:
        cfg = step_config(recipe, str(self.machine.dtype).removeprefix("torch."), core_of(recipe))
        token_bytes, rows = prepared.tokenizer.token_bytes(), recipe.micro_batch_rows
        counters, settings = train.Counters(), recipe.train
        assert settings.steps
        with jax.set_mesh(self._mesh):
            flops = flops_per_token(cfg)
            kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
            for group, size in group_sizes(cfg).items():
                kinds[group if group in KINDS else "scalars"] += size

            def evaluate(state: JaxTrainState) -> dict[str, Any]:
                found = validate(state.params, prepared.val, token_bytes, rows, self._mesh, cfg)
                return note(_Counted(counters, flops), found)

            plan = train.JaxTrainingPlan(
                cfg=cfg,
                mesh=self._mesh,
                steps=settings.steps,
                schedule=recipe.make_schedule(settings),
                micro_batch_rows=rows,
                max_skips=settings.max_skips,
                log_every=1,
                save_every=None,
                keep=1,
                flops_per_token=flops,
                peak_flops=math.inf,
                evaluators=[(every, evaluate)],
            )
            code, _ = train.train(
                init_state(recipe.seed, cfg),
                counters,
                make_batches(recipe, prepared.train),
                plan,
                Nowhere(self.out),
                self.out,
                self.log,
                lambda step, line: on_step(step, counters.seconds),
            )
        return code, _Counted(counters, flops), Counts(of_kinds(kinds), kv_elements_per_token=0)


class _Counted:
    """The counters of a run, with FLOPs; those of the update are left out."""

    def __init__(self, counters: train.Counters, flops_per_token: float) -> None:
        self.step, self.tokens, self.seconds = counters.step, counters.tokens, counters.seconds
        self.flops = Flops(products=counters.positions * flops_per_token)
