"""Benchmark of causal attention alone: every path there is here, forward and backward, by length and mask.

It is the table behind what `Machine.attention` holds. Masks: full (causal and nothing more), a window of a quarter of
the row, documents of a quarter of the row on average. Paths: on a CPU the blocked one, torch's SDPA (with a dense mask
for a window or documents), the plain definition (whole score matrices in fp32), and flex_attention at the longest
length, forward alone: it has no backward there and compiles anew for every shape. On a GPU whatever is installed
(backends.py). A call gets 4,096 tokens in all, 4 heads of 64, in the compute dtype, eager but for flex; what
a path changes in the layout is part of it. Milliseconds a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quern.bench.material import random_batch, reference
from quern.bench.record import Measure, Outcome, Setup, alternate, number, rates, ratios, seconds_of
from quern.kernels.attention.attend import MaskSpec
from quern.kernels.attention.autotune import Picked, available, kind_of
from quern.kernels.attention.backends import BLOCKED, PLAIN, SDPA, Backend, flex
from quern.machine import Machine
from quern.optim.schedule import Multipliers
from quern.recipe import Recipe
from quern.terminal import grid
from quern.train.state import build_model, build_state
from quern.train.step import train_step

TOKENS, HEADS, HEAD_DIM = 4096, 4, 64
LENGTHS = (256, 512, 1024, 2048)
WAYS = ("forward", "backward")

Seconds = dict[tuple[str, str, str], tuple[float, ...]]
"""By mask, path and way: a value for each round."""


def attention(setup: Setup) -> Outcome:
    tokens, lengths = (128, (32, 64)) if setup.quick else (TOKENS, LENGTHS)
    paths, alone = paths_of(setup.machine, setup.quick)
    names = [path.name for path in [*paths, *alone]]
    measures: list[Measure] = []
    rows: list[list[str]] = []
    for length in lengths:
        masks = dict(example_masks(tokens // length, length, setup.machine, setup.seed))
        taken = _measure(setup, masks, length, paths, WAYS)
        if length == lengths[-1]:
            taken |= _measure(setup, masks, length, alone, WAYS[:1])
        figures = {key: tuple(1e3 * second for second in seconds) for key, seconds in taken.items()}
        measures += [Measure(f"T={length}, {m}: {p} {w}", "ms", ms) for (m, p, w), ms in figures.items()]
        measures += _gains(taken, setup.machine, length, masks)
        for mask in masks:
            cells = [figures.get((mask, name, way)) for name in names for way in WAYS]
            rows.append(
                [str(length), mask, *("" if ms is None else number(Measure("", "", ms).median) for ms in cells)]
            )
    head = ["T", "mask", *(f"{name} {way}" for name in names for way in ("fwd", "bwd"))]
    settings = {"tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM, "picked": str(setup.machine.attention)}
    gains = [m for m in measures if m.unit == "×"]
    lines = ["  milliseconds a call, medians", *grid(head, rows), *(f"  {m.name}: {number(m.median)}×" for m in gains)]
    return Outcome(measures, settings, lines)


def paths_of(machine: Machine, quick: bool) -> tuple[list[Backend], list[Backend]]:
    """Those that are measured everywhere, and those that are measured at the longest length, forward alone."""
    if machine.device.type != "cpu":
        return [*available(machine), PLAIN], []
    return [BLOCKED, SDPA, PLAIN], [flex()] if machine.compile and not quick else []


def example_masks(rows: int, T: int, machine: Machine, seed: int) -> Iterator[tuple[str, MaskSpec]]:
    """One of each kind, by name; documents of random lengths."""
    yield "full", MaskSpec()
    yield f"window {T // 4}", MaskSpec(T // 4)
    begins_BT = torch.rand(rows, T, generator=machine.generator(seed)) < 4 / T
    yield "documents", MaskSpec(None, begins_BT.cumsum(1).int().to(machine.device))


def picked_for(machine: Machine, mask: MaskSpec, T: int) -> str:
    """The name of the path that the machine would take."""
    attention = machine.attention
    if not isinstance(attention, Picked):
        raise TypeError("the machine has not chosen how to compute attention: use autotune.select_attention")
    return getattr(attention, kind_of(mask, T)).name


def _gains(taken: Seconds, machine: Machine, T: int, masks: Mapping[str, MaskSpec]) -> Iterator[Measure]:
    """What masks spare as they are picked, and what the pick gains over SDPA, both ways together."""

    def both(mask: str, path: str) -> tuple[float, ...]:
        return tuple(a + b for a, b in zip(*(taken[mask, path, way] for way in WAYS), strict=True))

    full = both("full", picked_for(machine, masks["full"], T))
    for name, mask in masks.items():
        path = picked_for(machine, mask, T)
        if name != "full":
            yield Measure(f"T={T}: full / {name}, as picked", "×", ratios(full, both(name, path)))
        if path != SDPA.name:
            yield Measure(f"T={T}, {name}: sdpa / {path}", "×", ratios(both(name, SDPA.name), both(name, path)))


def _measure(
    setup: Setup, masks: Mapping[str, MaskSpec], T: int, paths: list[Backend], ways: tuple[str, ...]
) -> Seconds:
    """All masks and paths take turns."""
    machine = setup.machine
    numbers = machine.generator(setup.seed)
    rows = len(masks["documents"].documents_BT) if masks["documents"].documents_BT is not None else 1
    q, k, v, grad = (
        torch.randn(rows, T, HEADS, HEAD_DIM, generator=numbers).to(machine.device, machine.dtype) for _ in range(4)
    )
    inputs = [x.requires_grad_(len(ways) == len(WAYS)) for x in (q, k, v)]
    made: dict[tuple[str, str], Tensor] = {}
    jobs: dict[tuple[str, str, str], Callable[[], float]] = {}

    def add(name: str, path: Backend, mask: MaskSpec) -> None:
        def forward() -> float:
            return seconds_of(lambda: made.update({(name, path.name): path.attend(q, k, v, mask, None)}), machine)

        def backward() -> float:
            if (name, path.name) not in made:  # in rounds that go backwards
                forward()
            return seconds_of(lambda: torch.autograd.grad(made.pop((name, path.name)), inputs, grad), machine)

        jobs.update({(name, path.name, way): job for way, job in zip(ways, (forward, backward), strict=False)})

    for name, mask in masks.items():
        for path in paths:
            add(name, path, path.prepare(mask, T, machine.device))
    named = alternate(setup.rounds, {"|".join(key): job for key, job in jobs.items()})
    return {key: named["|".join(key)] for key in jobs}


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
