"""JAX's half of `quern bench grug`, a process of its own: it steps when it is asked to, and idles otherwise.

`python -m quern.bench.jax_child FOLDER` reads order.json and the batches 0.npz, 1.npz, … there, compiles, and
answers each line of its input with a JSON line:

    "facts"             → {"dtype": …, "default": "whole" or "blocks", "block_tokens": …, "jax": version}
    "whole", "blocks"   → {"seconds": the median of STEPS training steps with that loss}

An error is answered with {"error": …} and ends it, as the end of its input does. It imports no torch: JAX is measured
as `quern grug train` runs it, with memory that is kept from the start on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from quern.grug.mesh import keep_freed_memory

STEPS = 4


def answers(folder: Path, requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    """One for each request, in order."""
    keep_freed_memory()
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    _confine(order["threads"])
    import jax

    if order["device"] == "cpu":
        jax.config.update("jax_platforms", "cpu")
    facts, jobs = _prepare(order, folder)
    for request in requests:
        name = request.strip()
        yield facts if name == "facts" else {"seconds": jobs[name]()}


def _confine(threads: int) -> None:
    """XLA takes a thread for each processor that it may run on."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _prepare(order: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Callable[[], float]]]:
    from dataclasses import replace

    import jax
    import numpy as np

    from quern.data.batch import Batch
    from quern.grug.dtype import choose_dtype
    from quern.grug.loss import BLOCK_TOKENS
    from quern.grug.model import init_parameters
    from quern.grug.optim import rules
    from quern.grug.state import step_config
    from quern.recipe import Recipe

    # The twin's callables in place of the named ones, which import torch.
    recipe = Recipe.from_json(order["recipe"], make_model=init_parameters, make_rules=rules)
    dtype = choose_dtype(None)
    cfg = step_config(recipe, dtype)
    batches = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            batches.append(Batch(file["tokens"], file["targets"], file["mask"]))
    sizes = {"whole": None, "blocks": order["block_tokens"] or BLOCK_TOKENS}
    jobs = {
        name: _job(recipe.seed, replace(cfg, block_tokens=size), batches, order["rows"]) for name, size in sizes.items()
    }
    default = "whole" if cfg.block_tokens is None else "blocks"
    facts = {"dtype": dtype, "default": default, "block_tokens": sizes["blocks"], "jax": jax.__version__}
    return facts, jobs


def _job(seed: int, cfg: Any, batches: list[Any], rows: int) -> Callable[[], float]:
    """→ the median seconds of a step on one device, its batch already placed, as training's prefetch does."""
    import jax

    from quern.grug.mesh import make_mesh
    from quern.grug.state import device_batch, init_state, train_step
    from quern.optim.schedule import Multipliers

    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        placed = [device_batch(batch, rows, mesh) for batch in batches]
        states = [init_state(seed, cfg)]

    def seconds(n: int) -> float:
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            state, metrics = train_step(states.pop(), placed[n % len(placed)], Multipliers(), cfg)
            states.append(state)
            float(metrics["loss"])
        return time.perf_counter() - start

    seconds(0)
    return lambda: median(seconds(n) for n in range(STEPS))


def main(folder: Path) -> int:
    """Answers until the input ends; returns the exit code."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is not an answer
    try:
        for reply in answers(folder, iter(sys.stdin)):
            print(json.dumps(reply), file=replies, flush=True)
    except Exception as error:  # the parent raises it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
