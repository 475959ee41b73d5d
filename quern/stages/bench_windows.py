"""Benchmark of what windows are worth in training: the recipe's SSSL against every layer long, at context 2,048.

Models of the reference size but for the context take turns, a step of 4,096 tokens each, and a ratio is that of each
round. How much it can be is bounded by what attention's share of a step is: windows of a quarter leave 0.44 of the
pairs of query and key, in three layers of four, and nothing else gets cheaper. The faster full attention is, the less
windows can add; so every layer long by torch's own kernel is measured too: that is what a model without this
project's attention pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quern.kernels.attention_backends import SDPA
from quern.kernels.attention_pick import Picked
from quern.machine import Machine
from quern.optim.schedule import Multipliers
from quern.recipe import Recipe
from quern.stages.bench_model import random_batch, reference
from quern.stages.bench_record import Measure, Outcome, Setup, alternate, rates, ratios, seconds_of
from quern.train.state import build_model, build_state
from quern.train.step import train_step

CONTEXT = 2048


def windows(setup: Setup) -> Outcome:
    context = 64 if setup.quick else CONTEXT
    recipe = reference(setup.quick, setup.seed)
    jobs: dict[str, Callable[[], float]] = {}
    for name, pattern, machine in ways(setup.machine):
        shape = replace(recipe.model, context=context, windows=pattern)
        jobs[name] = _steps(replace(recipe, model=shape), machine)
    taken = alternate(setup.rounds, jobs)
    batch_tokens = recipe.train.batch_tokens
    assert batch_tokens
    measures = [
        Measure(f"training, {name}", "tokens/s", rates(batch_tokens, seconds)) for name, seconds in taken.items()
    ]
    windowed, *others = taken
    measures += [Measure(f"{windowed} / {name}", "×", ratios(taken[name], taken[windowed])) for name in others]
    shape = recipe.model
    settings = {"context": context, "layers": shape.depth, "width": shape.width, "batch_tokens": batch_tokens}
    return Outcome(measures, {**settings, "attention": str(setup.machine.attention)})


def ways(machine: Machine) -> list[tuple[str, str, Machine]]:
    """(name, pattern of windows, machine): the windowed one first, then what it is compared with."""
    stock = replace(machine, attention=Picked(SDPA, SDPA, SDPA, SDPA))
    return [("SSSL", "SSSL", machine), ("all long", "L", machine), ("all long by torch's SDPA", "L", stock)]


def _steps(recipe: Recipe, machine: Machine) -> Callable[[], float]:
    """Seconds of a step, the better of two: a model of its own, compiled where the machine compiles."""
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed))
    assert recipe.model.context and recipe.train.micro_batch_tokens
    rows = max(1, recipe.train.micro_batch_tokens // recipe.model.context)
    if machine.compile:
        state.model.compile(dynamic=False)

    def step() -> float:
        batch = random_batch(recipe, state.step)
        return seconds_of(lambda: train_step(state, batch, Multipliers(), machine, micro_batch_rows=rows), machine)

    return lambda: min(step(), step())
