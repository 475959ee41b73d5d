"""Benchmark of the two trainers beside each other at the reference size: tokens/s of PyTorch and of JAX, their ratio.

Both train the same recipe on the same random batches in the same process, each in the dtype it would choose here, in
turns, a few steps at a time; the ratio is taken round by round, so that whatever slows the machine down falls on both.
JAX's whole and blockwise losses are taken in turns as well, which is what the default (`measured_block`) rests on.
Compilation is left out. Not a comparison of models: both compute the same one (tests/laws/test_grug_law.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import jax

from quern.data.batch import Batch
from quern.grug.loss import BLOCK_TOKENS
from quern.grug.memory import keep_freed_memory
from quern.grug.mesh import make_mesh
from quern.grug.recipe import from_torch_json
from quern.grug.state import StepConfig, device_batch, init_state, step_config, train_step
from quern.optim.schedule import Multipliers
from quern.recipe import Recipe
from quern.stages.bench_model import random_batch, reference
from quern.stages.bench_record import Measure, Outcome, Setup, alternate, rates, ratios, seconds_of
from quern.stages.grug_train import choose_dtype
from quern.stages.pretrain import compile_model, micro_batch_rows
from quern.train.state import build_model, build_state
from quern.train.step import train_step as torch_step

STEPS = 4


def grug(setup: Setup) -> Outcome:
    """The figures of both trainers, and of both losses."""
    keep_freed_memory()
    recipe = reference(setup.quick, setup.seed, setup.batch_tokens)
    batches = [random_batch(recipe, seed) for seed in range(2)]
    dtype = choose_dtype(None)
    cfg = step_config(from_torch_json(recipe.to_json()), dtype)
    block_tokens = BLOCK_TOKENS if not setup.quick else 16
    whole, blocks = "JAX, whole loss", "JAX, blockwise loss"
    jobs = {
        "PyTorch": torch_job(recipe, setup, batches),
        whole: jax_job(recipe, replace(cfg, block_tokens=None), batches),
        blocks: jax_job(recipe, replace(cfg, block_tokens=block_tokens), batches),
    }
    seconds = alternate(setup.rounds, jobs)
    tokens = recipe.train.batch_tokens
    assert tokens
    speeds = {name: rates(tokens, values) for name, values in seconds.items()}
    torch_dtype = str(setup.machine.dtype).removeprefix("torch.")
    default = whole if cfg.block_tokens is None else blocks
    notes = {"PyTorch": torch_dtype, whole: dtype, blocks: f"{dtype}, {block_tokens} positions of a row at a time"}
    measures = [Measure(name, "tokens/s", values, notes[name]) for name, values in speeds.items()]
    measures.append(Measure("JAX / PyTorch", "", ratios(speeds[default], speeds["PyTorch"]), f"the default: {default}"))
    measures.append(Measure("whole / blockwise", "", ratios(speeds[whole], speeds[blocks])))
    shape = recipe.model
    settings = {
        "layers": shape.depth,
        "width": shape.width,
        "vocabulary": shape.vocab_size,
        "context": shape.context,
        "batch_tokens": tokens,
        "steps_per_round": STEPS,
        "jax": jax.__version__,
    }
    return Outcome(measures, settings)


def torch_job(recipe: Recipe, setup: Setup, batches: list[Batch]) -> Callable[[], float]:
    """→ the median seconds of a step, each time it is called."""
    machine, rows = setup.machine, micro_batch_rows(recipe)
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed))
    compile_model(state.model, machine)

    def step(batch: Batch) -> None:
        verdict = torch_step(state, batch, Multipliers(), machine, micro_batch_rows=rows).verdict
        if verdict != "step":
            raise RuntimeError("a step of the benchmark was not finite, so its time means nothing: report it")

    step(batches[0])
    return lambda: median(seconds_of(partial(step, batches[n % 2]), machine) for n in range(STEPS))


def jax_job(recipe: Recipe, cfg: StepConfig, batches: list[Batch]) -> Callable[[], float]:
    """→ the median seconds of a step on one device, its batch already placed, as training's prefetch does."""
    mesh, rows = make_mesh(devices=jax.devices()[:1]), micro_batch_rows(recipe)
    with jax.set_mesh(mesh):
        placed = [device_batch(batch, rows, mesh) for batch in batches]
        states = [init_state(recipe.seed, cfg)]

    def step(n: int) -> None:
        with jax.set_mesh(mesh):
            state, metrics = train_step(states.pop(), placed[n % 2], Multipliers(), cfg)
            states.append(state)
            float(metrics["loss"])

    step(0)
    return lambda: median(seconds_of(partial(step, n)) for n in range(STEPS))
