"""Benchmarks of training at the reference size: speed, MFU, start-up and memory (`train`), and two ranks (`ranks`).

docs/benchmarks/README.md says how. The child, `python -m quern.bench.train`, trains the reference model for the steps
of each request. The children of `ranks` exist all the time and wait while the others work.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.benchmark.utils.timer import timer

from quern.bench.material import left_to_itself, random_batch, reference, sizes_of
from quern.bench.measure import Figure, Setup, alternate, figure
from quern.data.batch import Batch
from quern.estimate.options import PROCESSORS
from quern.kernels.attention.autotune import select_attention
from quern.machine import Machine, detect, machine_flags, measure_peak_flops, peak_memory, reset_peak_memory
from quern.mesh import connect, disconnect
from quern.model.base import LanguageModel
from quern.model.count import FlopCounter
from quern.model.fp8 import use_fp8
from quern.optim.groups import make_groups
from quern.optim.schedule import Multipliers
from quern.parallel.zero2 import Zero2
from quern.process import Child, serve, start
from quern.recipe import Resolved
from quern.temporaries import scratch_folder
from quern.train.guard import Guard
from quern.train.state import TrainState, build_model, build_state, compile_model
from quern.train.step import train_step
from quern.train.timeline import communication, merge, recorded

ROUND_SECONDS = 2.5  # seconds of steps in a round of `train`; the matmul peak takes a fraction of a second
STARTS, START_STEPS = 3, 4
START_NOTES = {"cold": "everything compiled", "warm": "the compiler's cache is there", "eager": "eager"}
RANKS, STEPS = 2, 6
LEARNING_STEPS = 20  # steps on one batch, whose last loss shows whether a dtype learns
TRACED_STEPS = 3  # steps of a timeline, and of a profile of kernels

KINDS = {
    "rotation": "turn_kernel norm_gradient_kernel",
    "attention": "flash fmha forward_kernel query_gradient key_gradients statistics_k attend_ sdpa",
    "loss": "loss_kernel",
    "matrix products": "gemm nvjet cutlass xmma cublas scaled_mm ::mm ::bmm ::baddbmm ::addmm",
    "copies": "memcpy memset ::copy_",
}
"""Kinds of work by parts of a kernel's name, of which the first match counts; other kernels are elementwise work."""


def training_state(recipe: Resolved, machine: Machine, model: LanguageModel | None = None) -> TrainState:
    """Returns the model, by default a new one, and its optimizer; it is compiled where the machine compiles."""
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed) if model is None else model)
    compile_model(state.model, machine)
    return state


def take_step(state: TrainState, recipe: Resolved, machine: Machine, batch: Batch | None = None) -> tuple[float, float]:
    """Takes one optimizer step on a global batch, by default a random one. Returns its wall-clock seconds and its loss.
    Raises RuntimeError if the loss or the gradient is not finite."""
    batch, start = batch or random_batch(recipe, state.step), timer()
    result = train_step(state, batch, Multipliers(), machine, micro_batch_rows=recipe.micro_batch_rows)
    seconds = timer() - start
    if result.verdict != "step":
        norm = f"loss {result.loss}, gradient norm {result.grad_norm}"
        raise RuntimeError(f"a step of the benchmark was not finite ({norm}), so its time means nothing: report it")
    return seconds, result.loss


def train(setup: Setup, fp8: bool = False) -> Iterator[Figure]:
    machine = setup.machine
    recipe = reference(setup.quick, setup.seed, setup.batch_tokens, machine.device.type)
    if setup.start and not fp8:
        yield from _starts(setup)
    model = build_model(recipe, machine, recipe.seed)
    if fp8:
        setup.settings["computed"] = str(use_fp8(model))
    state = training_state(recipe, machine, model)
    sizes = {of.train.batch_tokens: of for of in (recipe, left_to_itself(recipe)) if of.train.batch_tokens}

    def seconds_at(tokens: int) -> float:
        return take_step(state, sizes[tokens], machine)[0]

    first, peak = next(iter(sizes)), partial(measure_peak_flops, machine, setup.sizes.product)
    learned = [take_step(state, recipe, machine, random_batch(recipe, 0))[1] for _ in range(LEARNING_STEPS)]
    reset_peak_memory(machine.device)  # the first one compiled
    usual = min(seconds_at(first) for _ in range(3))
    steps = {tokens: 2 if setup.quick else max(1, round(ROUND_SECONDS / usual * first / tokens)) for tokens in sizes}
    flops, dtype = FlopCounter(recipe).per_token(), str(machine.dtype).removeprefix("torch.")
    setup.settings.update(
        sizes_of(recipe),
        batch_tokens=" and ".join(f"{tokens:,}" for tokens in sizes),
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        MFLOP_per_token=round(flops / 1e6, 2),
        steps_per_round=" and ".join(str(steps[tokens]) for tokens in sizes),
    )
    yield figure("loss of a batch", "nats", learned[-1], f"its {LEARNING_STEPS}th step, {learned[0]:.3f} at the first")
    if setup.on_gpu:
        yield figure("memory", "GB", peak_memory(machine.device) / 1e9, f"at most, in steps of {first:,} tokens")
    peaks, taken = [peak()], []
    for _ in range(setup.rounds):
        for tokens in sizes:
            taken.append(statistics.median(seconds_at(tokens) for _ in range(steps[tokens])))
            peaks.append(peak())
    speeds = np.resize(list(sizes), len(taken)) / taken
    usage = 100 * flops * speeds / np.convolve(peaks, [0.5, 0.5], "valid")
    sheet = data_sheet(machine)
    for place, tokens in enumerate(sizes):
        rounds, step = slice(place, None, len(sizes)), f"steps of {tokens:,} tokens"
        yield figure(f"training, {step}", "tokens/s", speeds[rounds])
        yield figure(f"MFU, {step}", "%", usage[rounds], f"of the {dtype} matmul peak of its round")
        if sheet is not None:
            note = f"of {sheet / 1e12:,.0f} TFLOP/s"
            yield figure(f"MFU of the data sheet, {step}", "%", 100 * flops / sheet * speeds[rounds], note)
    yield figure("matmul peak", "TFLOP/s", 1e-12 * np.array(peaks), dtype)
    if setup.on_gpu:
        yield from slowest_kernels(lambda: seconds_at(first), True, statistics.median(taken[:: len(sizes)]))


def fp8(setup: Setup) -> Iterator[Figure]:
    """Training in FP8; its MFU, too, is over the peak of the compute dtype."""
    return train(setup, fp8=True)


def data_sheet(machine: Machine) -> float | None:
    """Returns the maker's bf16 FLOP/s of a known device (of several versions, the fastest), None in another dtype."""
    name = str(machine.describe()["processor"]).lower().replace(" ", "")
    known = (chip.peak_flops for part, chip in PROCESSORS.items() if part in name)
    return next(known, None) if machine.dtype == torch.bfloat16 else None


def slowest_kernels(step: Callable[[], object], on_gpu: bool, usual: float) -> Iterator[Figure]:
    """Percent of a step's usual seconds: the rest that no kernel takes, the kinds of kernels, and the 15 kernels that
    take longest; on a CPU operators."""
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, acc_events=True) as taken:
        for _ in range(TRACED_STEPS):
            step()
    kernels, kinds = cast(tuple[Any, Any], (Counter(), Counter()))  # counters of floats
    for event in taken.key_averages():
        # An operator's device time includes that of its kernels: on a GPU only kernels count.
        if not event.is_user_annotation and (not on_gpu or event.device_type.name == "CUDA"):
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            share = spent / 1e4 / TRACED_STEPS / usual
            kernels[f"kernel {event.key[:70]}"] += share
            name = event.key.lower()
            matching = (kind for kind, parts in KINDS.items() if any(part in name for part in parts.split()))
            kinds[f"time: {next(matching, 'elementwise')}"] += share
    yield figure("idle", "%", max(0.0, 100 - sum(kernels.values())))
    yield from (figure(name, "%", share) for name, share in (*kinds.most_common(), *kernels.most_common(15)))


def _starts(setup: Setup) -> Iterator[Figure]:
    """Trains a few steps in new processes. Cold and warm starts alternate; they are eager where nothing is compiled. A
    start lasts until the end of the first step. Its memory is the most bytes that the process held, for CUDA on its
    device."""
    kinds, memory = ("cold", "warm") if setup.machine.compile else ("eager",), 0
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(1 if setup.quick else STARTS):
        with scratch_folder() as cache:
            # The compiler keeps its precompiled header in TMPDIR, whatever the folder of its cache.
            variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(cache)}
            for kind in kinds:
                began = time.perf_counter()
                with start("quern.bench.train", "training", child_order(setup), variables) as process:
                    process.ask({"steps": 1, "overlap": True})
                    seconds[kind].append(time.perf_counter() - began)
                    memory = process.ask({"steps": START_STEPS - 1, "overlap": True})["peak_memory_bytes"]
    yield from (figure(f"start to first step, {kind}", "s", seconds[kind], START_NOTES[kind]) for kind in kinds)
    yield figure("peak memory", "MB", memory / 1e6, "of that process")


def ranks(setup: Setup) -> Iterator[Figure]:
    tokens = reference(setup.quick, setup.seed, setup.batch_tokens).train.batch_tokens
    waits: dict[bool, list[float]] = {True: [], False: []}
    with _crew(setup, 1, threads=RANKS) as one, _crew(setup, RANKS, threads=1) as two:
        for crew in (one, two):
            _steps(crew, 2, overlap=True)  # compiles

        def together(overlap: bool) -> float:
            seconds, waited = _steps(two, STEPS, overlap)
            waits[overlap].append(waited)
            return seconds

        jobs = {"two": lambda: together(True), "after": lambda: together(False)}
        taken = alternate(setup.rounds, {"one": lambda: _steps(one, STEPS, overlap=True)[0], **jobs})
        path = setup.trace
        traced = [] if path is None else list(_trace(path, two, setup))
    visible, without = (np.array(waits[overlap][1:]) for overlap in (True, False))
    setup.settings.update(batch_tokens=tokens, ranks=RANKS, steps_per_round=STEPS)
    yield figure("one process, two threads", "tokens/s", tokens * STEPS / taken["one"])
    yield figure("two processes, one thread each", "tokens/s", tokens * STEPS / taken["two"])
    yield figure("two processes over one", "%", 100 * taken["one"] / taken["two"], "round by round")
    yield figure("waiting for gradients, none leave early", "ms/step", 1e3 / STEPS * without)
    yield figure("waiting for gradients, as they come", "ms/step", 1e3 / STEPS * visible)
    yield figure("hidden behind the backward pass", "%", 100 * (1 - visible / without))
    yield figure("step if none leave early, over one if they do", "%", 100 * taken["after"] / taken["two"])
    yield from traced


def _trace(path: Path, crew: list[Child], setup: Setup) -> Iterator[Figure]:
    """Writes the timeline of a few steps of all ranks, and yields its figures, with a value for each rank."""
    with scratch_folder() as folder:
        files = [folder / f"{rank}.json" for rank in range(len(crew))]
        for child, file in zip(crew, files, strict=True):
            child.send({"steps": TRACED_STEPS, "overlap": True, "trace": str(file)})
        for child in crew:
            child.answer()
        traces = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    merge(path, traces)
    setup.log(f"  timeline: {path}, for ui.perfetto.dev")
    found = list(map(communication, traces))
    for name in found[0]:
        ran, waited = np.array([own[name] for own in found]).T
        yield figure(f"timeline: {name}", "ms/step", 1e3 / TRACED_STEPS * ran, "a value for each rank")
        yield figure(f"timeline: {name}, hidden", "%", 100 * (1 - waited / ran), "while the rank did not wait")


def _steps(crew: list[Child], count: int, overlap: bool) -> tuple[float, float]:
    """Returns the seconds until the last rank is done, and the longest wait of a rank for gradients: from the end of
    the last backward pass to the norm."""
    began = time.perf_counter()
    for child in crew:
        child.send({"steps": count, "overlap": overlap})
    answers = [child.answer() for child in crew]
    return time.perf_counter() - began, max(answer["waited_seconds"] for answer in answers)


@contextmanager
def _crew(setup: Setup, count: int, threads: int) -> Iterator[list[Child]]:
    """Runs `count` connected ranks for the length of the block."""
    order = child_order(setup, count)
    order["machine"] |= {"device": "cpu", "threads": threads}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:
        processes = (start("quern.bench.train", "rank", order | {"rank": rank}, variables) for rank in range(count))
        crew = [stack.enter_context(process) for process in processes]
        yield crew
        for child in crew:  # a rank waits for the others when it disconnects: close all before waiting for one
            child.close()


class DelayedZero2(Zero2):
    """Can hold all gradients back until the backward pass ends. early: whether they leave during that pass; waited:
    seconds that this rank waited between its end and the norm of the gradients."""

    early, waited, _before = True, 0.0, 0.0

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        with record_function("last backward pass"), super().last_backward() if self.early else nullcontext():
            yield
        self._before = self.mesh.waited_seconds()

    def grad_norm(self) -> Tensor:
        with record_function("sums and norm of the gradients"):
            norm = super().grad_norm()
        self.waited += self.mesh.waited_seconds() - self._before
        return norm

    def step(self, step: int, multipliers: Multipliers) -> None:
        with record_function("update"):
            super().step(step, multipliers)


def child_order(setup: Setup, ranks: int = 1) -> dict[str, Any]:
    order = {"machine": machine_flags(setup.machine), "seed": setup.seed, "quick": setup.quick}
    return order | {"batch_tokens": setup.batch_tokens, "rank": 0, "ranks": ranks}


def answers(order: dict[str, Any], requests: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Runs in a child: takes the steps of each request on the rows of its rank."""
    machine = select_attention(detect(**order["machine"]))
    mesh = connect(1, machine.device, order["rank"], order["ranks"])
    recipe = reference(order["quick"], order["seed"], order["batch_tokens"], machine.device.type)
    model = build_model(recipe, machine, recipe.seed)
    groups = make_groups(model.parameter_groups(), recipe.make_rules(recipe), model.named_parameters())
    optimizer = DelayedZero2(groups, dtype_ns=machine.dtype, compile=machine.compile, mesh=mesh)
    state = TrainState(model, optimizer, guard=Guard(recipe.train.max_skips))
    compile_model(model, machine)
    rows = slice(mesh.data.rank, None, mesh.data.size)
    for request in requests:
        optimizer.early, optimizer.waited = request["overlap"], 0.0
        with recorded(Path(request["trace"])) if "trace" in request else nullcontext():
            for _ in range(request["steps"]):
                whole = random_batch(recipe, state.step)
                batch = Batch(*(array[rows] for array in (whole.tokens, whole.targets, whole.mask)))
                take_step(state, recipe, machine, batch)
        yield {"waited_seconds": optimizer.waited, "peak_memory_bytes": peak_memory(machine.device)}
    disconnect(mesh)


if __name__ == "__main__":
    serve(answers)
