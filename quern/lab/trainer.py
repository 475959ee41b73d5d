"""Trains recipes repeatedly in one process, for studies: text, model and compilation are paid for once.

A trial is one training run that leaves numbers and no checkpoint. It runs the loop of `quern pretrain` with the same
batches and validation text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quern.machine import Machine
from quern.model.base import LanguageModel
from quern.model.count import Parameters, count, flop_counter, weightless
from quern.recipe import Recipe, Resolved
from quern.records import Records
from quern.resolve import resolve
from quern.runs.public_data import shards_used
from quern.runs.training import fit_to_text, make_batches, plan_of, set_up_training, validation
from quern.stages.prepare import Prepared, prepare
from quern.terminal import silent
from quern.text.tokenizer import Tokenizer
from quern.train import loop
from quern.train.guard import EXIT_DIVERGED, EXIT_DONE
from quern.train.state import Counters, build_model, build_state
from quern.train.step import TorchBackend

Note = Callable[[Counters, dict[str, Any]], dict[str, Any]]
"""(counters, a validation) → the validation, after it has been noted."""
Ready = tuple[loop.Backend, loop.TrainingPlan, Parameters]
"""A backend for a recipe, the settings of its loop, and the model's counts."""


@dataclass(frozen=True)
class Point:
    """One validation during a trial. seconds: time in steps; bpb: bits per byte of the validation text, None if that is
    not finite."""

    step: int
    tokens: int
    flops: float
    seconds: float
    bpb: float | None


@dataclass(frozen=True)
class Trial:
    """One finished training run of an arm. tokens: targets trained on; flops: FLOPs of all positions, with
    `flops_parts` as in `model.count.Flops`; seconds: time of all steps, at the speed after the first, which may
    compile; bpb: bits per byte at the end, None if it diverged; parameters: as in `model.count.Parameters`."""

    recipe: str
    steps: int = 0
    seed: int = 0
    data_seed: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    bpb: float | None = None
    tokens_per_second: float = 0.0
    parameters: dict[str, int] = field(default_factory=dict)
    curve: tuple[Point, ...] = ()
    flops_parts: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Trains recipes one after another. The last model is kept, compiled, for recipes with the same shape. out: the
    folder of tokenizers and token shards."""

    def __init__(self, out: Path, machine: Machine, log: Callable[[str], None] = silent) -> None:
        self.out, self.machine, self.log = out, machine, log
        self._prepared: tuple[str, Prepared] | None = None
        self._model: tuple[Any, LanguageModel, Parameters] | None = None

    def check(self, recipe: Recipe) -> None:
        """Raises ValueError if no run can have the values of the recipe together."""
        weightless(resolve(recipe))

    def train(
        self,
        recipe: Recipe,
        *,
        name: str,
        seed: int,
        data_seed: int,
        evaluations: int = 1,
        on_step: Callable[[int, float], None] = lambda step, seconds: None,
        on_eval: Callable[[Point], None] = lambda point: None,
    ) -> Trial:
        """Trains a recipe to the end of its steps.

        Args:
            recipe: A recipe as for `quern pretrain`. Its own seed decides the text of the built-in world, nothing else.
            name: Name of the arm, for the record.
            seed, data_seed: Seeds of the initial weights, and of the order of the batches.
            evaluations: Validations during the trial, at most; evenly spaced, the last one at the end.
            on_step: Called after each step with its number and the seconds in steps so far. It may block or raise.
            on_eval: Called after each validation. It may raise.

        Returns:
            The trial. One that diverged has no `bpb`.
        """
        prepared = self._data(resolve(recipe))
        resolved = replace(fit_to_text(recipe, prepared.tokenizer, prepared.train), seed=seed, data_seed=data_seed)
        curve: list[Point] = []

        def note(state: Counters, found: dict[str, Any]) -> dict[str, Any]:
            bpb = found["val_bpb"] if math.isfinite(found["val_bpb"]) else None
            curve.append(Point(state.step, state.tokens, state.flops.total, _all_steps(state.seconds, state.step), bpb))
            on_eval(curve[-1])
            return found

        with self._ready(resolved, prepared, -(-resolved.train.steps // evaluations), note) as (backend, plan, counts):
            plan = replace(plan, log_every=plan.steps, save_every=None)
            batches, folder = make_batches(resolved, prepared.train), Records(self.out)
            state, advance = backend.run, lambda *step: on_step(state.step, state.seconds)
            code = loop.train(backend, batches, plan, folder, loop.Reporter(self.log, advance), more_follows=True)
        if code not in (EXIT_DONE, EXIT_DIVERGED):
            self.log("the runs that have finished are kept: the same command goes on with the study")
            raise KeyboardInterrupt
        seconds = _all_steps(state.seconds, state.step)
        return Trial(
            recipe=name,
            steps=resolved.train.steps,
            seed=seed,
            data_seed=data_seed,
            tokens=state.tokens,
            flops=state.flops.total,
            flops_parts=asdict(state.flops),
            seconds=seconds,
            bpb=curve[-1].bpb if code == EXIT_DONE else None,
            tokens_per_second=state.tokens / seconds if seconds else 0.0,
            parameters=asdict(counts),
            curve=tuple(curve),
        )

    @contextmanager
    def _ready(self, recipe: Resolved, prepared: Prepared, every: int, note: Note) -> Iterator[Ready]:
        """Readies a model at step 0 for the body, and the loop's plan with a validation every so many steps."""
        model, counts = self._ready_model(recipe, prepared.tokenizer)
        model.initialize(recipe.seed)
        state = build_state(recipe, self.machine, model)
        score = validation(recipe, prepared.tokenizer, prepared.val, self.machine)
        plan = plan_of(recipe, flop_counter(recipe), [(every, lambda state: note(state, score(state)))])
        try:
            yield TorchBackend(state, self.machine, recipe.train.clip_norm, recipe.seed), plan, counts
        finally:
            state.optimizer.close()

    def _data(self, recipe: Resolved) -> Prepared:
        body, shards = recipe.to_json(), shards_used(recipe, self.out)
        key = json.dumps([shards, *(body[part] for part in ("data", "val", "seed", "text", "make_documents"))])
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = key, prepare(recipe, self.out, self.log)
        return self._prepared[1]

    def _ready_model(self, recipe: Resolved, tokenizer: Tokenizer) -> tuple[LanguageModel, Parameters]:
        key = recipe.make_model, recipe.model, recipe.train.fp8, recipe.train.recompute, tokenizer.fingerprint
        if self._model is None or self._model[0] != key:
            self._model = None  # frees the memory of the last one first
            if self.machine.compile:
                torch.compiler.reset()  # the compiler keeps a few versions of a function, whatever the model
            model = build_model(recipe, self.machine, None)
            counts = count(model)
            set_up_training(recipe, model, tokenizer, self.machine, self.log)
            self._model = key, model, counts
        return self._model[1:]


def _all_steps(seconds: float, steps: int) -> float:
    """The loop does not time the first step; it gets the mean of the others."""
    return seconds * steps / max(1, steps - 1)
