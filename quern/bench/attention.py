"""Benchmarks of attention: every path alone, by length and mask, and training with windows.

`attention` is the table behind the choice in `Machine.attention`, in milliseconds a call, forward and backward. Masks:
full (causal), a window of a quarter of the row, documents of a quarter of the row on average. Paths on a CPU: blocked,
torch's SDPA (with a dense mask for a window or documents), the plain definition (whole score matrices in fp32), and
flex_attention at the longest length, forward alone: it has no backward pass there and compiles for every shape. Paths
on a GPU: all that are installed (backends.py). A call gets 4,096 tokens, 4 heads of 64, in the compute dtype, eager
except for flex; a path's changes of layout are included.

`windows` is training of the reference model at a context of 2,048: with windows SSSL, with every layer long, and with
every layer long by torch's SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from quern.bench.material import random_batch, reference, take_step, training_state
from quern.bench.record import Measure, Outcome, Setup, alternate, number, rates, ratios, scaled, seconds_of
from quern.kernels.attention.attend import MaskSpec
from quern.kernels.attention.autotune import Picked, available, kind_of
from quern.kernels.attention.backends import BLOCKED, PLAIN, SDPA, Backend, flex
from quern.machine import Machine
from quern.recipe import Recipe
from quern.terminal import grid

TOKENS, HEADS, HEAD_DIM = 4096, 4, 64
LENGTHS = (256, 512, 1024, 2048)
PASSES = ("forward", "backward")
CONTEXT = 2048

Seconds = dict[tuple[str, str, str], tuple[float, ...]]
"""By mask, path and pass: a value for each round."""


def attention(setup: Setup) -> Outcome:
    tokens, lengths = (128, (32, 64)) if setup.quick else (TOKENS, LENGTHS)
    paths, alone = paths_of(setup.machine, setup.quick)
    columns = list(product([path.name for path in [*paths, *alone]], PASSES))
    measures: list[Measure] = []
    rows: list[list[str]] = []
    for length in lengths:
        masks = dict(example_masks(tokens // length, length, setup.machine, setup.seed))
        taken = _measure(setup, masks, tokens // length, length, paths, backward=True)
        if length == lengths[-1]:
            taken |= _measure(setup, masks, tokens // length, length, alone, backward=False)
        cells = {
            key: Measure("T={}, {}: {} {}".format(length, *key), "ms", scaled(1e3, seconds))
            for key, seconds in taken.items()
        }
        measures += [*cells.values(), *_gains(taken, setup.machine, length, masks)]
        for mask in masks:
            row = [cells.get((mask, *column)) for column in columns]
            rows.append([str(length), mask, *("" if cell is None else number(cell.median) for cell in row)])
    head = ["T", "mask", *(f"{name} {'fwd' if way == 'forward' else 'bwd'}" for name, way in columns)]
    settings = {"tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM, "picked": str(setup.machine.attention)}
    gains = [f"  {m.name}: {number(m.median)}×" for m in measures if m.unit == "×"]
    return Outcome(measures, settings, ["  milliseconds a call, medians", *grid(head, rows), *gains])


def paths_of(machine: Machine, quick: bool) -> tuple[list[Backend], list[Backend]]:
    """Returns the paths to measure at all lengths, and those to measure at the longest one, forward alone."""
    if machine.device.type != "cpu":
        return [*available(machine), PLAIN], []
    return [BLOCKED, SDPA, PLAIN], [flex()] if machine.compile and not quick else []


def example_masks(rows: int, T: int, machine: Machine, seed: int) -> Iterator[tuple[str, MaskSpec]]:
    """Yields one mask of each kind with its name; documents have random lengths."""
    yield "full", MaskSpec()
    yield f"window {T // 4}", MaskSpec(T // 4)
    begins_BT = torch.rand(rows, T, generator=machine.generator(seed)) < 4 / T
    yield "documents", MaskSpec(None, begins_BT.cumsum(1).int().to(machine.device))


def _gains(taken: Seconds, machine: Machine, T: int, masks: Mapping[str, MaskSpec]) -> Iterator[Measure]:
    """Yields the gain of each mask over full attention, and of the machine's path over SDPA, both passes together."""
    if not isinstance(machine.attention, Picked):
        raise TypeError("the machine has not chosen how to compute attention: use autotune.select_attention")
    picked = {name: getattr(machine.attention, kind_of(mask, T)).name for name, mask in masks.items()}

    def both(mask: str, path: str) -> tuple[float, ...]:
        return tuple(a + b for a, b in zip(*(taken[mask, path, way] for way in PASSES), strict=True))

    for name, path in picked.items():
        if name != "full":
            ratio = ratios(both("full", picked["full"]), both(name, path))
            yield Measure(f"T={T}: full / {name}, as picked", "×", ratio)
        if path != SDPA.name:
            yield Measure(f"T={T}, {name}: sdpa / {path}", "×", ratios(both(name, SDPA.name), both(name, path)))


def _measure(
    setup: Setup, masks: Mapping[str, MaskSpec], rows: int, T: int, paths: list[Backend], backward: bool
) -> Seconds:
    """Times all masks and paths, which alternate."""
    machine, numbers = setup.machine, setup.machine.generator(setup.seed)
    q, k, v, grad = (
        torch.randn(rows, T, HEADS, HEAD_DIM, generator=numbers).to(machine.device, machine.dtype) for _ in range(4)
    )
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]
    made: dict[str, Tensor] = {}
    jobs: dict[str, Callable[[], float]] = {}
    keys: dict[str, tuple[str, str, str]] = {}
    for (name, mask), path in product(masks.items(), paths):
        place, prepared = f"{name}|{path.name}", path.prepare(mask, T, machine.device)

        def forward(place: str = place, path: Backend = path, mask: MaskSpec = prepared) -> float:
            return seconds_of(lambda: made.update({place: path.attend(q, k, v, mask, None)}), machine)

        def after(place: str = place, forward: Callable[[], float] = forward) -> float:
            if place not in made:  # in rounds of reverse order
                forward()
            return seconds_of(lambda: torch.autograd.grad(made.pop(place), inputs, grad), machine)

        for way, job in zip(PASSES, (forward, after) if backward else (forward,), strict=False):
            jobs[f"{place}|{way}"], keys[f"{place}|{way}"] = job, (name, path.name, way)
    return {keys[place]: seconds for place, seconds in alternate(setup.rounds, jobs).items()}


def windows(setup: Setup) -> Outcome:
    """Tokens/s of training, and the gain of windows over the two other ways."""
    context, recipe = 64 if setup.quick else CONTEXT, reference(setup.quick, setup.seed)
    stock = replace(setup.machine, attention=Picked(SDPA, SDPA, SDPA, SDPA))
    ways = {
        "SSSL": ("SSSL", setup.machine),
        "all long": ("L", setup.machine),
        "all long by torch's SDPA": ("L", stock),
    }
    jobs = {
        name: _steps(replace(recipe, model=replace(recipe.model, context=context, windows=pattern)), machine)
        for name, (pattern, machine) in ways.items()
    }
    taken = alternate(setup.rounds, jobs)
    batch_tokens, shape = recipe.train.batch_tokens, recipe.model
    assert batch_tokens
    measures = [Measure(f"training, {name}", "tokens/s", rates(batch_tokens, taken[name])) for name in ways]
    windowed, *others = ways
    measures += [Measure(f"{windowed} / {name}", "×", ratios(taken[name], taken[windowed])) for name in others]
    settings = {"context": context, "layers": shape.depth, "width": shape.width, "batch_tokens": batch_tokens}
    return Outcome(measures, {**settings, "attention": str(setup.machine.attention)})


def _steps(recipe: Recipe, machine: Machine) -> Callable[[], float]:
    """Returns a function that trains a new model for two steps and returns the seconds of the faster one."""
    state = training_state(recipe, machine)
    return lambda: min(take_step(state, random_batch(recipe, state.step), recipe, machine)[0] for _ in range(2))
