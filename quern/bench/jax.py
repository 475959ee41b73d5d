"""Benchmark of the two trainers beside each other at the reference size: tokens/s of PyTorch and of JAX, their ratio.

Both train the same recipe on the same random batches, each in a process of its own and in the dtype it would choose
here, in turns, a few steps at a time; the ratio is taken round by round, so that whatever slows the machine down falls
on both. JAX's process is jax_child.py, which waits for a line while PyTorch steps. JAX's whole and blockwise
losses are taken in turns as well, which is what the default (`measured_block`) rests on. Compilation is left out. Not a
comparison of models: both compute the same one (tests/laws/test_grug_law.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np

import quern
from quern.bench.jax_child import STEPS
from quern.bench.material import random_batch, reference
from quern.bench.record import Measure, Outcome, Setup, alternate, rates, ratios, seconds_of
from quern.data.batch import Batch
from quern.machine import environment
from quern.optim.schedule import Multipliers
from quern.recipe import Recipe
from quern.train.state import build_model, build_state, compile_model
from quern.train.step import train_step as torch_step

NAMES = {"whole": "JAX, whole loss", "blocks": "JAX, blockwise loss"}


def grug(setup: Setup) -> Outcome:
    """The figures of both trainers, and of both losses."""
    recipe = reference(setup.quick, setup.seed, setup.batch_tokens)
    batches = [random_batch(recipe, seed) for seed in range(2)]
    with jax_process(recipe, setup, batches, 16 if setup.quick else None) as process:
        facts = process.ask("facts")  # compiled before PyTorch is
        jobs = {"PyTorch": torch_job(recipe, setup, batches)}
        jobs |= {name: partial(process.seconds, job) for job, name in NAMES.items()}
        seconds = alternate(setup.rounds, jobs)
    tokens = recipe.train.batch_tokens
    assert tokens
    speeds = {name: rates(tokens, values) for name, values in seconds.items()}
    torch_dtype = str(setup.machine.dtype).removeprefix("torch.")
    dtype, whole, blocks, default = facts["dtype"], NAMES["whole"], NAMES["blocks"], NAMES[facts["default"]]
    notes = {
        "PyTorch": torch_dtype,
        whole: dtype,
        blocks: f"{dtype}, {facts['block_tokens']} positions of a row at a time",
    }
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
        "jax": facts["jax"],
    }
    return Outcome(measures, settings)


def torch_job(recipe: Recipe, setup: Setup, batches: list[Batch]) -> Callable[[], float]:
    """→ the median seconds of a step, each time it is called."""
    machine, rows = setup.machine, recipe.micro_batch_rows
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed))
    compile_model(state.model, machine)

    def step(batch: Batch) -> None:
        verdict = torch_step(state, batch, Multipliers(), machine, micro_batch_rows=rows).verdict
        if verdict != "step":
            raise RuntimeError("a step of the benchmark was not finite, so its time means nothing: report it")

    step(batches[0])
    return lambda: median(seconds_of(partial(step, batches[n % 2]), machine) for n in range(STEPS))


@dataclass(frozen=True)
class JaxProcess:
    """The child and its last words (stderr)."""

    process: subprocess.Popen[str]
    errors: IO[str]

    def ask(self, request: str) -> dict[str, Any]:
        """Its answer. Raises RuntimeError with what it said last when it failed."""
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(f"{request}\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise RuntimeError(f"the JAX process of the benchmark failed: {answer['error']}")
        return answer

    def seconds(self, job: str) -> float:
        return self.ask(job)["seconds"]

    def _last_words(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        return " | ".join([f"it ended with code {code}", *self.errors.read().strip().splitlines()[-5:]])


@contextmanager
def jax_process(
    recipe: Recipe, setup: Setup, batches: Sequence[Batch], block_tokens: int | None
) -> Iterator[JaxProcess]:
    """A process that trains in JAX when asked to (jax_child.py); it ends with the block."""
    # The child finds this very quern, installed or not.
    paths = [str(Path(quern.__file__).parent.parent), environment().get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        write_order(Path(name), recipe, setup, batches, block_tokens)
        with subprocess.Popen(
            [sys.executable, "-m", "quern.bench.jax_child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**environment(), "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            encoding="utf-8",
        ) as process:
            try:
                yield JaxProcess(process, errors)
            finally:
                assert process.stdin
                with suppress(BrokenPipeError):
                    process.stdin.close()


def write_order(folder: Path, recipe: Recipe, setup: Setup, batches: Sequence[Batch], block_tokens: int | None) -> None:
    """What the process finds when it starts: order.json and the batches. block_tokens: None for the default."""
    order = {
        "recipe": recipe.to_json(),
        "rows": recipe.micro_batch_rows,
        "block_tokens": block_tokens,
        "device": setup.machine.device.type,
        "threads": setup.machine.threads,
    }
    (folder / "order.json").write_text(json.dumps(order), encoding="utf-8")
    for n, batch in enumerate(batches):
        np.savez(folder / f"{n}.npz", tokens=batch.tokens, targets=batch.targets, mask=batch.mask)
