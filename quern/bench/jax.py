"""Benchmark of both trainers at the reference size: tokens/s of PyTorch and of JAX, and their ratio.

Both train the same recipe on the same random batches, each in its own process and in the dtype that it chooses on this
machine. They alternate, a few steps at a time, and the ratio is taken in each round, so that a slowdown of the machine
affects both. The JAX process (jax_child.py) waits for a request while PyTorch steps. The whole and the blockwise loss
of JAX alternate too: the default (`measured_block`) rests on their ratio. Compilation is left out. The two models are
the same (tests/laws/test_grug_law.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from quern.bench.batches import random_batch
from quern.bench.jax_child import STEPS
from quern.bench.material import reference, sizes_of, take_step, training_state
from quern.bench.measure import Figure, alternate, figure
from quern.bench.options import Setup
from quern.child import start
from quern.recipe import Recipe

NAMES = {"whole": "JAX, whole loss", "blocks": "JAX, blockwise loss"}


def grug(setup: Setup) -> Iterator[Figure]:
    recipe = reference(setup.quick, setup.seed, setup.options.batch_tokens)
    with start("quern.bench.jax_child", "JAX", jax_order(recipe, setup, 16 if setup.quick else None)) as process:
        facts = process.ask("facts")  # JAX compiles before PyTorch does
        jobs = {"PyTorch": _torch_job(recipe, setup)}
        jobs |= {name: lambda job=job: process.ask(job)["seconds"] for job, name in NAMES.items()}
        taken = alternate(setup.rounds, jobs)
    setup.settings.update(sizes_of(recipe), steps_per_round=STEPS, jax=facts["jax"])
    dtype, whole, blocks, default = facts["dtype"], NAMES["whole"], NAMES["blocks"], NAMES[facts["default"]]
    notes = {"PyTorch": str(setup.machine.dtype).removeprefix("torch."), whole: dtype}
    notes[blocks] = f"{dtype}, {facts['block_tokens']} positions of a row at a time"
    for name, seconds in taken.items():
        yield figure(name, "tokens/s", setup.settings["batch_tokens"] / seconds, notes[name])
    yield figure("JAX / PyTorch", "", taken["PyTorch"] / taken[default], f"the default: {default}")
    yield figure("whole / blockwise", "", taken[blocks] / taken[whole])


def _torch_job(recipe: Recipe, setup: Setup) -> Callable[[], float]:
    """Returns a function that takes some PyTorch steps and returns their median seconds."""
    state, batches = training_state(recipe, setup.machine), [random_batch(recipe, seed) for seed in range(2)]
    take_step(state, recipe, setup.machine, batches[0])  # compiles
    return lambda: median(take_step(state, recipe, setup.machine, batches[n % 2])[0] for n in range(STEPS))


def jax_order(recipe: Recipe, setup: Setup, block_tokens: int | None) -> dict[str, Any]:
    """Returns the order for the JAX process. block_tokens: of the blockwise loss, None for the default."""
    order = {"recipe": recipe.to_json(), "rows": recipe.micro_batch_rows, "block_tokens": block_tokens}
    return order | {"device": setup.machine.device.type, "threads": setup.machine.threads}
