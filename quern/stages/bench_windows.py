"""Benchmark of what windows are worth in training: the recipe's SSSL against every layer long, at context 2,048.

Two models of the reference size but for the context take turns, a step of 4,096 tokens each, and the ratio is that of
each round. How much it can be is bounded by what attention's share of a step is: windows of a quarter leave 0.44 of the
pairs of query and key, in three layers of four, and nothing else gets cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quern.optim.schedule import Multipliers
from quern.recipe import Recipe
from quern.stages.bench_model import random_batch, reference
from quern.stages.bench_record import Measure, Outcome, Setup, alternate, rates, ratios, seconds_of
from quern.train.state import build_model, build_state
from quern.train.step import train_step

CONTEXT = 2048
PATTERNS = ("SSSL", "L")


def windows(setup: Setup) -> Outcome:
    context = 64 if setup.quick else CONTEXT
    recipe = reference(setup.quick, setup.seed)
    jobs: dict[str, Callable[[], float]] = {}
    for pattern in PATTERNS:
        jobs[pattern] = _steps(replace(recipe, model=replace(recipe.model, context=context, windows=pattern)), setup)
    taken = alternate(setup.rounds, jobs)
    batch_tokens = recipe.train.batch_tokens
    assert batch_tokens
    measures = [Measure(f"training, {name}", "tokens/s", rates(batch_tokens, taken[name])) for name in PATTERNS]
    measures.append(Measure("SSSL / all long", "×", ratios(taken["L"], taken["SSSL"])))
    shape = recipe.model
    settings = {"context": context, "layers": shape.depth, "width": shape.width, "batch_tokens": batch_tokens}
    return Outcome(measures, settings)


def _steps(recipe: Recipe, setup: Setup) -> Callable[[], float]:
    """Seconds of a step, the better of two: a model of its own, compiled where the machine compiles."""
    machine = setup.machine
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed))
    assert recipe.model.context and recipe.train.micro_batch_tokens
    rows = max(1, recipe.train.micro_batch_tokens // recipe.model.context)
    if machine.compile:
        state.model.compile(dynamic=False)

    def step() -> float:
        batch = random_batch(recipe, state.step)
        return seconds_of(lambda: train_step(state, batch, Multipliers(), machine, micro_batch_rows=rows), machine)

    return lambda: min(step(), step())
