"""Dropout in the loop: resumed = uninterrupted, no draw is repeated, nothing is dropped while a model is measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.data.loader import Batch, Loader
from quern.eval.bits_per_byte import batch_losses
from quern.optim.schedule import Multipliers
from quern.recipe import ModelRecipe, Recipe
from quern.recipes.llama import RECIPE
from quern.records import read_metrics
from quern.resolve import resolve
from quern.train.state import TrainState, build_model, build_state
from tests.support.toy_training import (
    CONTEXT,
    CPU,
    VOCABULARY,
    differing,
    snapshot,
    toy_corpus,
    toy_loader,
    toy_plan,
    toy_schedule,
)
from tests.train.test_loop import go

pytestmark = pytest.mark.usefixtures("eager")


def dropping(dropout: float = 0.2) -> TrainState:
    shape = ModelRecipe(width=32, head_dim=16, context=CONTEXT, vocab_size=VOCABULARY, windows="L", dropout=dropout)
    recipe: Recipe = resolve(replace(RECIPE, depth=2, model=shape))
    return build_state(recipe, CPU, build_model(recipe, CPU, 0))


def test_a_resumed_run_drops_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    schedule = toy_schedule(8)
    whole, first, second = dropping(), dropping(), dropping()
    go(tmp_path / "whole", whole, toy_plan(8, schedule=schedule))
    go(tmp_path / "parts", first, toy_plan(4, schedule=schedule))
    torch.rand(1000)  # whatever else the process has drawn
    go(tmp_path / "parts", second, toy_plan(8, schedule=schedule), again=True)
    assert differing(snapshot(whole), snapshot(second)) == []


class OneBatch(Loader):
    """The same batch at every step."""

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        return super().batch(0, rank, ranks)


def test_every_step_and_every_seed_draws_anew(tmp_path: Path) -> None:
    """At a rate of zero the weights stay, so that losses on one batch differ by what is dropped alone."""

    def losses(dropout: float, seed: int) -> list[float]:
        path = tmp_path / f"{dropout}-{seed}"
        plan = toy_plan(4, schedule=lambda step: Multipliers(lr=0.0))
        go(path, dropping(dropout), plan, OneBatch(toy_corpus(), CONTEXT, 8, 0), seed=seed)
        return [line["loss"] for line in read_metrics(path)]

    assert len(set(losses(0.0, seed=0))) == 1
    drawn = losses(0.2, seed=0) + losses(0.2, seed=1)
    assert len(set(drawn)) == 8


def test_nothing_is_dropped_while_it_is_measured(tmp_path: Path) -> None:
    seen: list[tuple[bool, float, float]] = []

    def evaluate(state: TrainState) -> dict[str, Any]:
        batch = toy_loader().batch(99)
        one, other = (batch_losses(state.model, batch.tokens, batch.targets, CPU).mean() for _ in range(2))
        seen.append((state.model.training, one, other))
        return {"val_loss": float(one)}

    state, without = dropping(), dropping()
    go(tmp_path / "a", state, toy_plan(4, evaluators=[(1, evaluate)]))
    go(tmp_path / "b", without, toy_plan(4))
    assert len(seen) == 4 and all(not training and one == other for training, one, other in seen)
    assert state.model.training
    assert differing(snapshot(state), snapshot(without)) == []
