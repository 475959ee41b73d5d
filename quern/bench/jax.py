"""Benchmark of both trainers at the reference size: tokens/s of PyTorch and of JAX, and their ratio.

Both train the same recipe on the same random batches, each in its own process and in the dtype that it chooses on this
machine. They alternate, a few steps at a time, and the ratio is taken in each round, so that a slowdown of the machine
affects both. The JAX process (jax_child.py) waits for a request while PyTorch steps. The whole and the blockwise loss
of JAX alternate too: the default (`measured_block`) rests on their ratio. Compilation is left out. The two models are
the same (tests/laws/test_grug_law.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from quern.bench.child import Child, start
from quern.bench.jax_child import STEPS
from quern.bench.material import random_batch, reference, take_step, training_state
from quern.bench.record import Measure, Outcome, Setup, alternate, rates, ratios
from quern.data.batch import Batch
from quern.recipe import Recipe

NAMES = {"whole": "JAX, whole loss", "blocks": "JAX, blockwise loss"}


def grug(setup: Setup) -> Outcome:
    recipe = reference(setup.quick, setup.seed, setup.batch_tokens)
    batches = [random_batch(recipe, seed) for seed in range(2)]
    with jax_process(recipe, setup, batches, 16 if setup.quick else None) as process:
        facts = process.ask("facts")  # JAX compiles before PyTorch does
        jobs = {"PyTorch": torch_job(recipe, setup, batches)}
        jobs |= {name: lambda job=job: process.ask(job)["seconds"] for job, name in NAMES.items()}
        seconds = alternate(setup.rounds, jobs)
    tokens, shape = recipe.train.batch_tokens, recipe.model
    assert tokens
    speeds = {name: rates(tokens, values) for name, values in seconds.items()}
    dtype, whole, blocks, default = facts["dtype"], NAMES["whole"], NAMES["blocks"], NAMES[facts["default"]]
    notes = {"PyTorch": str(setup.machine.dtype).removeprefix("torch."), whole: dtype}
    notes[blocks] = f"{dtype}, {facts['block_tokens']} positions of a row at a time"
    measures = [Measure(name, "tokens/s", values, notes[name]) for name, values in speeds.items()]
    measures.append(Measure("JAX / PyTorch", "", ratios(speeds[default], speeds["PyTorch"]), f"the default: {default}"))
    measures.append(Measure("whole / blockwise", "", ratios(speeds[whole], speeds[blocks])))
    settings = {
        "layers": shape.depth,
        "width": shape.width,
        "vocabulary": shape.vocab_size,
        "context": shape.context,
        "batch_tokens": tokens,
        "steps_per_round": STEPS,
        "jax": facts["jax"],
    }
    return Outcome(measures, settings)


def torch_job(recipe: Recipe, setup: Setup, batches: list[Batch]) -> Callable[[], float]:
    """Returns a function that takes some PyTorch steps and returns their median seconds."""
    state = training_state(recipe, setup.machine)
    take_step(state, batches[0], recipe, setup.machine)  # compiles
    return lambda: median(take_step(state, batches[n % 2], recipe, setup.machine)[0] for n in range(STEPS))


@contextmanager
def jax_process(recipe: Recipe, setup: Setup, batches: Sequence[Batch], block_tokens: int | None) -> Iterator[Child]:
    """Runs a process that trains in JAX on request. block_tokens: of the blockwise loss, None for the default."""
    with tempfile.TemporaryDirectory() as folder:
        order = make_order(Path(folder), recipe, setup, batches, block_tokens)
        with start("quern.bench.jax_child", "JAX", order) as process:
            yield process


def make_order(
    folder: Path, recipe: Recipe, setup: Setup, batches: Sequence[Batch], block_tokens: int | None
) -> dict[str, Any]:
    """Writes the batches to the folder and returns the order for the JAX process."""
    for n, batch in enumerate(batches):
        np.savez(folder / f"{n}.npz", tokens=batch.tokens, targets=batch.targets, mask=batch.mask)
    return {
        "folder": str(folder),
        "recipe": recipe.to_json(),
        "rows": recipe.micro_batch_rows,
        "block_tokens": block_tokens,
        "device": setup.machine.device.type,
        "threads": setup.machine.threads,
    }
