"""Benchmark of training at the reference size: tokens/s, MFU, start-up time, peak memory.

Two step sizes are measured: `--batch-tokens`, and the size that the recipe derives from its model. Rounds alternate
between the machine's matmul peak (the best of a dozen large square products in the compute dtype) and some optimizer
steps of each size, so that a slowdown of the machine affects both. A step is what the training loop times: forward,
loss, backward, gradient norm and update of one global batch. The MFU of a round is its rate times the model's FLOPs per
token (6 per matmul parameter, and attention without a discount for causality) over the mean of the peaks before and
after it.

Start-up and peak memory are those of a new process (`python -m quern.bench.train`), which trains a few steps. The clock
runs from before the interpreter starts to the end of the first step, compilation included. A cold start compiles
everything, the compiler's precompiled header too; a warm start finds the compiler's cache on disk.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from quern.bench.child import machine_flags, serve, start
from quern.bench.material import left_to_itself, random_batch, reference, take_step, training_state
from quern.bench.record import Measure, Outcome, Setup, scaled
from quern.kernels.attention.autotune import select_attention
from quern.machine import Machine, detect, measure_peak_flops
from quern.model.count import flops_per_token

ROUND_SECONDS = 2.5
"""Seconds of steps in a round; the matmul peak takes a fraction of a second."""
STARTS, START_STEPS = 3, 4
START_NOTES = {"cold": "everything compiled", "warm": "the compiler's cache is there", "eager": "eager"}


def train(setup: Setup) -> Outcome:
    recipe = reference(setup.quick, setup.seed, setup.batch_tokens)
    starts = _starts(setup) if setup.start else []
    state = training_state(recipe, setup.machine)
    sizes = {of.train.batch_tokens: of for of in (recipe, left_to_itself(recipe)) if of.train.batch_tokens}

    def seconds_at(tokens: int) -> float:
        return take_step(state, random_batch(sizes[tokens], state.step), sizes[tokens], setup.machine)[0]

    def peak() -> float:
        return measure_peak_flops(setup.machine, 256 if setup.quick else 2048)

    first = next(iter(sizes))
    seconds_at(first)  # compiles
    usual = min(seconds_at(first) for _ in range(3))
    steps = {tokens: 2 if setup.quick else max(1, round(ROUND_SECONDS / usual * first / tokens)) for tokens in sizes}
    flops, peaks = flops_per_token(recipe), [peak()]
    speeds: dict[int, list[float]] = {tokens: [] for tokens in sizes}
    usage: dict[int, list[float]] = {tokens: [] for tokens in sizes}
    for _ in range(setup.rounds):
        for tokens in sizes:
            speeds[tokens].append(tokens / statistics.median(seconds_at(tokens) for _ in range(steps[tokens])))
            peaks.append(peak())
            usage[tokens].append(100 * speeds[tokens][-1] * flops / statistics.mean(peaks[-2:]))
    dtype = str(setup.machine.dtype).removeprefix("torch.")
    measures = []
    for tokens in sizes:
        step = f"steps of {tokens:,} tokens"
        measures.append(Measure(f"training, {step}", "tokens/s", tuple(speeds[tokens])))
        measures.append(Measure(f"MFU, {step}", "%", tuple(usage[tokens]), f"of the {dtype} matmul peak of its round"))
    measures += [Measure("matmul peak", "TFLOP/s", scaled(1e-12, peaks), dtype), *starts]
    shape = recipe.model
    settings = {
        "layers": shape.depth,
        "width": shape.width,
        "heads": shape.heads,
        "vocabulary": shape.vocab_size,
        "context": shape.context,
        "windows": shape.windows,
        "batch_tokens": " and ".join(f"{tokens:,}" for tokens in sizes),
        "micro_batch_tokens": recipe.train.micro_batch_tokens,
        "MFLOP_per_token": round(flops / 1e6, 2),
        "steps_per_round": " and ".join(str(steps[tokens]) for tokens in sizes),
    }
    return Outcome(measures, settings)


# Start-up ---------------------------------------------------------------------------------------------------------


def _starts(setup: Setup) -> list[Measure]:
    """Alternates cold and warm starts, or measures eager ones where nothing is compiled."""
    seconds: dict[str, list[float]] = {kind: [] for kind in (("cold", "warm") if setup.machine.compile else ("eager",))}
    peak_bytes = None
    for _ in range(1 if setup.quick else STARTS):
        with tempfile.TemporaryDirectory(prefix="quern-bench-") as cache:
            for kind in seconds:
                taken, peak_bytes = first_step(setup.machine, setup.seed, setup.quick, setup.batch_tokens, cache)
                seconds[kind].append(taken)
    measures = [Measure(f"start to first step, {k}", "s", tuple(v), START_NOTES[k]) for k, v in seconds.items()]
    if peak_bytes is not None:
        measures.append(Measure("peak memory", "MB", (peak_bytes / 1e6,), "of that process"))
    return measures


def first_step(machine: Machine, seed: int, quick: bool, batch_tokens: int, cache: str) -> tuple[float, int | None]:
    """Trains a few steps of the reference model in a new process.

    Args:
        machine: The machine that the process must find.
        seed: The recipe's seed.
        quick: Train the tiny model.
        batch_tokens: Tokens of a step.
        cache: Folder for the compiler; an empty one makes a cold start.

    Returns:
        Seconds from the start of the process to the end of its first step, and the most bytes that it held (on its
        device, for CUDA), None where the system does not say.
    """
    order = {"machine": machine_flags(machine), "seed": seed, "quick": quick, "batch_tokens": batch_tokens}
    # The compiler keeps its precompiled header in TMPDIR, whatever the folder of its cache.
    variables = {"TORCHINDUCTOR_CACHE_DIR": cache, "TMPDIR": cache}
    began = time.perf_counter()
    with start("quern.bench.train", "training", order, variables) as process:
        process.answer()
        return time.perf_counter() - began, process.answer()["peak_memory_bytes"]


def answers(order: dict[str, Any], _: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Runs in the new process: answers after the first step and after the last one."""
    machine = select_attention(detect(**order["machine"]))
    recipe = reference(order["quick"], order["seed"], order["batch_tokens"])
    state = training_state(recipe, machine)
    for step in range(START_STEPS):
        take_step(state, random_batch(recipe, step), recipe, machine)
        if step == 0:
            yield {"step": 1}
    on_cuda = machine.device.type == "cuda"
    yield {"peak_memory_bytes": torch.cuda.max_memory_allocated() if on_cuda else peak_resident_bytes()}


def peak_resident_bytes() -> int | None:
    """Returns the most physical memory that this process has held.

    Linux reports it in /proc: the value of getrusage there is never below what the parent held at the start.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except OSError:
        if sys.platform == "darwin":
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


if __name__ == "__main__":
    serve(answers)
