"""Benchmark of two ranks against one process: `quern bench ranks`.

Two gloo ranks of one thread each train the reference model with the same global batch as one process of two threads.
All processes exist all the time and wait while the others work. A round is a few steps of each.

The hidden share of communication: the two ranks also take steps in which no gradient leaves before the backward pass
ends. The visible wait is the time that a rank waits between the end of that pass and the norm of the summed gradients
(`DelayedZero2`; the larger of the two ranks). The hidden share is how much smaller it is if gradients leave during the
backward pass. On a CPU the reductions need the cores that compute, so less time is saved than hidden.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from quern.bench.child import Child, machine_flags, serve, start
from quern.bench.material import random_batch, reference, take_step
from quern.bench.record import Measure, Outcome, Setup, alternate, rates, ratios, scaled
from quern.data.batch import Batch
from quern.kernels.attention.autotune import select_attention
from quern.machine import detect
from quern.mesh import connect, disconnect
from quern.optim.groups import make_groups
from quern.parallel.zero2 import Zero2
from quern.train.guard import Guard
from quern.train.state import TrainState, build_model, compile_model

RANKS = 2
STEPS = 6


def ranks(setup: Setup) -> Outcome:
    tokens = reference(setup.quick, setup.seed, setup.batch_tokens).train.batch_tokens
    assert tokens
    waits: dict[bool, list[float]] = {True: [], False: []}
    with _crew(setup, 1, threads=RANKS) as one, _crew(setup, RANKS, threads=1) as two:
        for crew in (one, two):
            _steps(crew, 2, overlap=True)  # compiles

        def together(overlap: bool) -> float:
            seconds, waited = _steps(two, STEPS, overlap)
            waits[overlap].append(waited)
            return seconds

        jobs = {
            "one": lambda: _steps(one, STEPS, overlap=True)[0],
            "two": lambda: together(True),
            "after": lambda: together(False),
        }
        taken = alternate(setup.rounds, jobs)
    visible, without = waits[True][1:], waits[False][1:]
    hidden = tuple(100 * (1 - ratio) for ratio in ratios(visible, without))
    measures = [
        Measure("one process, two threads", "tokens/s", rates(tokens * STEPS, taken["one"])),
        Measure("two processes, one thread each", "tokens/s", rates(tokens * STEPS, taken["two"])),
        Measure("two processes over one", "%", scaled(100, ratios(taken["one"], taken["two"])), "round by round"),
        Measure("waiting for gradients, none leave early", "ms/step", scaled(1e3 / STEPS, without)),
        Measure("waiting for gradients, as they come", "ms/step", scaled(1e3 / STEPS, visible)),
        Measure("hidden behind the backward pass", "%", hidden),
        Measure(
            "step if none leave early, over one if they do", "%", scaled(100, ratios(taken["after"], taken["two"]))
        ),
    ]
    return Outcome(measures, {"batch_tokens": tokens, "ranks": RANKS, "steps_per_round": STEPS})


def _steps(crew: list[Child], count: int, overlap: bool) -> tuple[float, float]:
    """Returns the seconds until the last rank is done, and the longest wait for gradients of a rank."""
    began = time.perf_counter()
    for child in crew:
        child.send({"steps": count, "overlap": overlap})
    answers = [child.answer() for child in crew]
    return time.perf_counter() - began, max(answer["waited_seconds"] for answer in answers)


@contextmanager
def _crew(setup: Setup, count: int, threads: int) -> Iterator[list[Child]]:
    """Runs `count` connected ranks for the length of the block."""
    order = {
        "machine": machine_flags(setup.machine, threads) | {"device": "cpu"},
        "seed": setup.seed,
        "quick": setup.quick,
        "batch_tokens": setup.batch_tokens,
        "ranks": count,
    }
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:
        crew = [
            stack.enter_context(start("quern.bench.ranks", "rank", order | {"rank": rank}, variables))
            for rank in range(count)
        ]
        yield crew
        for child in crew:  # a rank waits for the others when it disconnects: close all before waiting for one
            child.close()


class DelayedZero2(Zero2):
    """Can hold all gradients back until the backward pass ends.

    Attributes:
        early: Whether gradients leave during the backward pass.
        waited: Seconds that this rank waited between the end of the backward pass and the norm of the gradients.
    """

    early, waited, _before = True, 0.0, 0.0

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        with super().last_backward() if self.early else nullcontext():
            yield
        self._before = self.mesh.waited_seconds()

    def grad_norm(self) -> Tensor:
        norm = super().grad_norm()
        self.waited += self.mesh.waited_seconds() - self._before
        return norm


def answers(order: dict[str, Any], requests: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Runs in a rank: takes the steps of each request on this rank's rows."""
    machine = select_attention(detect(**order["machine"]))
    mesh = connect(1, machine.device, order["rank"], order["ranks"])
    recipe = reference(order["quick"], order["seed"], order["batch_tokens"])
    model = build_model(recipe, machine, recipe.seed)
    groups = make_groups(model.parameter_groups(), recipe.make_rules(recipe), model.named_parameters())
    optimizer = DelayedZero2(groups, dtype_ns=machine.dtype, compile=machine.compile, mesh=mesh)
    state = TrainState(model, optimizer, Guard(recipe.train.max_skips))
    compile_model(model, machine)
    rows = slice(mesh.data.rank, None, mesh.data.size)
    for request in requests:
        optimizer.early, optimizer.waited = request["overlap"], 0.0
        for _ in range(request["steps"]):
            whole = random_batch(recipe, state.step)
            batch = Batch(*(array[rows] for array in (whole.tokens, whole.targets, whole.mask)))
            take_step(state, batch, recipe, machine)
        yield {"waited_seconds": optimizer.waited}
    disconnect(mesh)


if __name__ == "__main__":
    serve(answers)
