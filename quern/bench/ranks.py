"""Benchmark of two processes against one: `quern bench ranks`.

Two gloo processes of one thread each train the reference model with the global batch that one process of two threads
trains with; both are there all the time, each waits while the other works, and a round is a few steps of each in turns
(tokens/s, and the round's own ratio). A step is what the training loop times.

What of the communication the backward pass hides: the two processes also take steps in which no gradient leaves before
the backward pass is over. Visible is the time that a rank waits from the end of that pass until it has the norm
of the summed gradients (`Late`; of the two ranks, the longer); hidden is the share of it that goes away when gradients
leave as they come. On a CPU
the sums need the cores that compute, so that less time is saved than hidden.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from torch import Tensor

import quern
from quern.bench.material import random_batch, reference
from quern.bench.record import Measure, Outcome, Setup, alternate, rates, ratios
from quern.data.batch import Batch
from quern.kernels.attention.autotune import select_attention
from quern.machine import Machine, detect, environment
from quern.mesh import connect, disconnect
from quern.optim.groups import make_groups
from quern.optim.schedule import Multipliers
from quern.parallel.zero2 import Zero2
from quern.recipe import Recipe
from quern.train.guard import Guard
from quern.train.state import TrainState, build_model, compile_model
from quern.train.step import train_step

RANKS = 2
STEPS = 6
TIMEOUT_SECONDS = 600


def ranks(setup: Setup) -> Outcome:
    recipe = reference(setup.quick, setup.seed, setup.batch_tokens)
    tokens = recipe.train.batch_tokens
    assert tokens
    with ExitStack() as stack:
        one = stack.enter_context(_processes(setup, 1, threads=RANKS))
        two = stack.enter_context(_processes(setup, RANKS, threads=1))
        for crew in (one, two):
            crew.steps(2, overlap=True)  # compiles
        waits: dict[str, list[float]] = {"overlap": [], "after": []}

        def together(overlap: bool) -> float:
            seconds, waited = two.steps(STEPS, overlap)
            waits["overlap" if overlap else "after"].append(waited)
            return seconds

        taken = alternate(
            setup.rounds,
            {
                "one": lambda: one.steps(STEPS, overlap=True)[0],
                "two": lambda: together(True),
                "after": lambda: together(False),
            },
        )
    amount = tokens * STEPS
    visible, without = waits["overlap"][1:], waits["after"][1:]
    ratio, slower = ratios(taken["one"], taken["two"]), ratios(taken["after"], taken["two"])
    measures = [
        Measure("one process, two threads", "tokens/s", rates(amount, taken["one"])),
        Measure("two processes, one thread each", "tokens/s", rates(amount, taken["two"])),
        Measure("two processes over one", "%", tuple(100 * one for one in ratio), "round by round"),
        Measure("standing for gradients, none leave early", "ms/step", tuple(1e3 * w / STEPS for w in without)),
        Measure("standing for gradients, as they come", "ms/step", tuple(1e3 * w / STEPS for w in visible)),
        Measure("hidden behind the backward pass", "%", tuple(100 * (1 - r) for r in ratios(visible, without))),
        Measure("step if none leave early, over one if they do", "%", tuple(100 * r for r in slower)),
    ]
    return Outcome(measures, {"batch_tokens": tokens, "ranks": RANKS, "steps_per_round": STEPS})


class Crew:
    """Processes that wait for orders, from the outside."""

    def __init__(self, processes: list[subprocess.Popen[str]], errors: IO[str]) -> None:
        self.processes, self.errors = processes, errors

    def steps(self, count: int, overlap: bool) -> tuple[float, float]:
        """→ seconds until the last rank was done, and seconds that the one which waited longest stood for gradients.

        Raises RuntimeError with a rank's last words.
        """
        start = time.perf_counter()
        for process in self.processes:
            assert process.stdin
            process.stdin.write(json.dumps({"steps": count, "overlap": overlap}) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() if process.stdout else "" for process in self.processes]
        seconds = time.perf_counter() - start
        if not all(answers):
            self.errors.seek(0)
            raise RuntimeError("a rank of the benchmark failed: " + " | ".join(self.errors.read().splitlines()[-5:]))
        return seconds, max(json.loads(answer)["stood_seconds"] for answer in answers)


@contextmanager
def _processes(setup: Setup, count: int, threads: int) -> Iterator[Crew]:
    order = {
        "dtype": {"bfloat16": "bf16", "float32": "fp32"}[str(setup.machine.dtype).removeprefix("torch.")],
        "compile": setup.machine.compile,
        "threads": threads,
        "seed": setup.seed,
        "quick": setup.quick,
        "batch_tokens": setup.batch_tokens,
        "ranks": count,
    }
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    paths = [str(Path(quern.__file__).parent.parent), environment().get("PYTHONPATH", "")]
    shared = {
        **environment(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors, ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "quern.bench.ranks", json.dumps({**order, "rank": rank})],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=shared,
                    encoding="utf-8",
                )
            )
            for rank in range(count)
        ]
        try:
            yield Crew(processes, errors)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        for process in processes:  # all are told before any is waited for
            assert process.stdin
            process.stdin.close()
        for process in processes:
            process.wait(TIMEOUT_SECONDS)


class Late(Zero2):
    """Can hold all gradients back until the backward pass is over. stood: seconds from there to the gradients' norm
    that this rank has waited in."""

    early, stood, _before = True, 0.0, 0.0

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        with super().last_backward() if self.early else nullcontext():
            yield
        self._before = self.mesh.waited_seconds()

    def grad_norm(self) -> Tensor:
        norm = super().grad_norm()
        self.stood += self.mesh.waited_seconds() - self._before
        return norm


def serve(order: dict[str, Any]) -> None:
    """What a process does: a JSON order on each line of stdin, a JSON answer on each of stdout."""
    machine = select_attention(detect("cpu", order["dtype"], order["compile"], order["threads"]))
    mesh = connect(1, machine.device, order["rank"], order["ranks"])
    recipe = reference(order["quick"], order["seed"], order["batch_tokens"])
    model = build_model(recipe, machine, recipe.seed)
    groups = make_groups(model.parameter_groups(), recipe.make_rules(recipe), model.named_parameters())
    optimizer = Late(groups, dtype_ns=machine.dtype, compile=machine.compile, mesh=mesh)
    state = TrainState(model, optimizer, Guard(recipe.train.max_skips))
    compile_model(model, machine)
    for line in sys.stdin:
        asked = json.loads(line)
        optimizer.early, optimizer.stood = asked["overlap"], 0.0
        for _ in range(asked["steps"]):
            _step(state, recipe, machine)
        print(json.dumps({"stood_seconds": optimizer.stood}), flush=True)
    disconnect(mesh)


def _step(state: TrainState, recipe: Recipe, machine: Machine) -> None:
    """One step on this rank's rows. Raises RuntimeError when it was skipped."""
    whole, data = random_batch(recipe, state.step), state.optimizer.mesh.data
    batch = Batch(*(array[data.rank :: data.size] for array in (whole.tokens, whole.targets, whole.mask)))
    result = train_step(state, batch, Multipliers(), machine, micro_batch_rows=recipe.micro_batch_rows)
    if result.verdict != "step":
        raise RuntimeError("a step of the benchmark was not finite, so its time means nothing: report it")


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
