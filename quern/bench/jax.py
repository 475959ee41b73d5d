"""Benchmark of both trainers: PyTorch and JAX train the reference recipe on the same random batches.

Each runs in its own process and in the dtype that it chooses on this machine. They alternate, a few steps at a time,
and so do the whole and, not on a GPU, the blockwise loss of JAX: its default (`measured_block`) rests on their ratio.

`python -m quern.bench.jax` is the JAX process. It imports no torch: JAX is measured as `quern grug train` runs it. To
"facts" it answers its dtype, default loss and jobs; to "whole" and "blocks" the seconds of a step with that loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import jax

from quern.bench.material import random_batch, reference, sizes_of
from quern.grug.evaluate import choose_dtype
from quern.grug.mesh import make_mesh, use_device
from quern.grug.model import init_parameters
from quern.grug.optim import rules
from quern.grug.state import BLOCK_TOKENS, device_batch, init_state, step_config, train_step
from quern.optim.schedule import Multipliers
from quern.process import serve, start
from quern.recipe import Resolved

if TYPE_CHECKING:
    from quern.bench.measure import Figure, Setup

NAMES = {"whole": "JAX, whole loss", "blocks": "JAX, blockwise loss"}
STEPS = 4
CUDA_TOKENS = 16_384


def grug(setup: Setup) -> Iterator[Figure]:
    from quern.bench.measure import alternate, figure
    from quern.bench.train import take_step, training_state

    machine, tokens = setup.machine, setup.batch_tokens or (CUDA_TOKENS if setup.on_gpu else None)
    recipe = reference(setup.quick, setup.seed, tokens, machine.device.type)
    block_tokens = None if setup.on_gpu else 16 if setup.quick else BLOCK_TOKENS
    order = {"recipe": recipe.to_json(), "block_tokens": block_tokens}
    order |= {"device": machine.device.type, "threads": machine.threads}
    # JAX would take three quarters of a GPU's memory, which PyTorch needs as well.
    with start("quern.bench.jax", "JAX", order, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}) as process:
        facts = process.ask("facts")  # JAX compiles before PyTorch does
        state, batches = training_state(recipe, machine), [random_batch(recipe, seed) for seed in range(2)]
        take_step(state, recipe, machine, batches[0])  # compiles

        def torch_seconds() -> float:
            return median(take_step(state, recipe, machine, batches[n % 2])[0] for n in range(STEPS))

        jobs = {NAMES[job]: lambda job=job: process.ask(job)["seconds"] for job in facts["jobs"]}
        taken = alternate(setup.rounds, {"PyTorch": torch_seconds, **jobs})
    setup.settings.update(sizes_of(recipe), steps_per_round=STEPS, jax=jax.__version__)
    dtype, whole, blocks, default = facts["dtype"], NAMES["whole"], NAMES["blocks"], NAMES[facts["default"]]
    notes = {"PyTorch": str(machine.dtype).removeprefix("torch."), whole: dtype}
    notes[blocks] = f"{dtype}, {block_tokens} positions of a row at a time"
    for name, seconds in taken.items():
        yield figure(name, "tokens/s", setup.settings["batch_tokens"] / seconds, notes[name])
    yield figure("JAX / PyTorch", "", taken["PyTorch"] / taken[default], f"the default: {default}")
    if blocks in taken:
        yield figure("whole / blockwise", "", taken[blocks] / taken[whole])


def answers(order: dict[str, Any], requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    use_device(order["device"], order["threads"])
    # The twin's callables in place of the named ones, which import torch.
    recipe = Resolved.from_json(order["recipe"], make_model=init_parameters, make_rules=rules)
    dtype = choose_dtype(None)
    cfg = step_config(recipe, dtype)
    sizes = {"whole": None} | ({"blocks": order["block_tokens"]} if order["block_tokens"] else {})
    jobs = {name: _job(recipe, replace(cfg, block_tokens=size)) for name, size in sizes.items()}
    facts = {"dtype": dtype, "default": "whole" if cfg.block_tokens is None else "blocks", "jobs": list(jobs)}
    for request in requests:
        yield facts if request == "facts" else {"seconds": jobs[request]()}


def _job(recipe: Resolved, cfg: Any) -> Callable[[], float]:
    """Returns a function that takes some steps on one device and returns their median seconds."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        batches = [device_batch(random_batch(recipe, seed), recipe.micro_batch_rows, mesh) for seed in range(2)]
        states = [init_state(recipe.seed, cfg)]

    def seconds(n: int) -> float:
        began = time.perf_counter()
        with jax.set_mesh(mesh):
            state, metrics = train_step(states.pop(), batches[n % 2], Multipliers(), cfg)
            states.append(state)
            float(metrics["loss"])
        return time.perf_counter() - began

    seconds(0)  # compiles
    return lambda: median(seconds(n) for n in range(STEPS))


if __name__ == "__main__":
    serve(answers)
