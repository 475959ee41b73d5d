"""The JAX process of `quern bench grug`: it trains some steps on request and is idle otherwise.

It compiles at its start, then answers the requests (quern/child.py):

    "facts"             → {"dtype": …, "default": "whole" or "blocks", "block_tokens": …, "jax": version}
    "whole", "blocks"   → {"seconds": the median of STEPS training steps with that loss}

It imports no torch: JAX is measured as `quern grug train` runs it, with freed memory kept from the start.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import jax

from quern.bench.batches import random_batch
from quern.child import serve
from quern.grug.dtype import choose_dtype
from quern.grug.loss import BLOCK_TOKENS
from quern.grug.mesh import keep_freed_memory, make_mesh
from quern.grug.model import init_parameters
from quern.grug.optim import rules
from quern.grug.state import device_batch, init_state, step_config, train_step
from quern.optim.schedule import Multipliers
from quern.recipe import Recipe

STEPS = 4


def answers(order: dict[str, Any], requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    keep_freed_memory()
    if sys.platform == "linux":  # XLA takes a thread for each processor that it may run on
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order["threads"]])
    if order["device"] == "cpu":
        jax.config.update("jax_platforms", "cpu")
    # The twin's callables in place of the named ones, which import torch.
    recipe = Recipe.from_json(order["recipe"], make_model=init_parameters, make_rules=rules)
    dtype = choose_dtype(None)
    cfg = step_config(recipe, dtype)
    sizes = {"whole": None, "blocks": order["block_tokens"] or BLOCK_TOKENS}
    jobs = {k: _job(recipe, replace(cfg, block_tokens=size), order["rows"]) for k, size in sizes.items()}
    default = "whole" if cfg.block_tokens is None else "blocks"
    facts = {"dtype": dtype, "default": default, "block_tokens": sizes["blocks"], "jax": jax.__version__}
    for request in requests:
        yield facts if request == "facts" else {"seconds": jobs[request]()}


def _job(recipe: Recipe, cfg: Any, rows: int) -> Callable[[], float]:
    """Returns a function that takes some steps on one device and returns their median seconds.

    The batches are on the device already, as the prefetch of training leaves them.
    """
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        batches = [device_batch(random_batch(recipe, seed), rows, mesh) for seed in range(2)]
        states = [init_state(recipe.seed, cfg)]

    def seconds(n: int) -> float:
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            state, metrics = train_step(states.pop(), batches[n % 2], Multipliers(), cfg)
            states.append(state)
            float(metrics["loss"])
        return time.perf_counter() - start

    seconds(0)  # compiles
    return lambda: median(seconds(n) for n in range(STEPS))


if __name__ == "__main__":
    serve(answers)
