"""Benchmark of training at the reference size: tokens/s, MFU, start-up, peak memory.

For steps of two sizes: that of `--batch-tokens`, and the one which the recipe picks where it is left to itself, for
the horizon of its size. Rounds alternate between the machine's matmul peak (the best of a dozen large square products
in the compute dtype) and some optimizer steps of either size, so that whatever slows the machine down meanwhile falls
on all. A step is what the training loop times: forward, loss, backward, gradient norm and update of one global batch.
The MFU of a round is its rate times the model's FLOPs per token (6 per matmul parameter, and attention without
subtracting the causal half), over the mean of the peaks before and after it. Compilation is in the start-up figure
only.
"""

from __future__ import annotations

import statistics
import tempfile

from quern.bench.material import left_to_itself, random_batch, reference
from quern.bench.record import Measure, Outcome, Setup, seconds_of
from quern.bench.start import Started, first_step
from quern.machine import measure_peak_flops
from quern.model.count import flops_per_token
from quern.optim.schedule import Multipliers
from quern.recipe import Recipe
from quern.train.state import TrainState, build_model, build_state, compile_model
from quern.train.step import train_step

ROUND_SECONDS = 2.5  # of steps; the peak takes a fraction of a second
STARTS = 3


def train(setup: Setup) -> Outcome:
    machine = setup.machine
    recipe = reference(setup.quick, setup.seed, setup.batch_tokens)
    starts = _starts(setup) if setup.start else []
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed))
    compile_model(state.model, machine)
    _step(state, recipe, setup)  # compiles
    usual = min(_step(state, recipe, setup) for _ in range(3))
    sizes = {of.train.batch_tokens: of for of in (recipe, left_to_itself(recipe)) if of.train.batch_tokens}
    first, *_ = sizes
    steps = {tokens: 2 if setup.quick else max(1, round(ROUND_SECONDS / usual * first / tokens)) for tokens in sizes}
    flops = flops_per_token(recipe)
    peaks = [_peak(setup)]
    speeds: dict[int, list[float]] = {tokens: [] for tokens in sizes}
    usage: dict[int, list[float]] = {tokens: [] for tokens in sizes}
    for _ in range(setup.rounds):
        for tokens, of in sizes.items():
            seconds = statistics.median(_step(state, of, setup) for _ in range(steps[tokens]))
            peaks.append(_peak(setup))
            speeds[tokens].append(tokens / seconds)
            usage[tokens].append(100 * speeds[tokens][-1] * flops / statistics.mean(peaks[-2:]))
    dtype = str(machine.dtype).removeprefix("torch.")
    measures = []
    for tokens in sizes:
        step = f"steps of {tokens:,} tokens"
        measures.append(Measure(f"training, {step}", "tokens/s", tuple(speeds[tokens])))
        measures.append(Measure(f"MFU, {step}", "%", tuple(usage[tokens]), f"of the {dtype} matmul peak of its round"))
    measures += [Measure("matmul peak", "TFLOP/s", tuple(peak / 1e12 for peak in peaks), dtype), *starts]
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


def _step(state: TrainState, recipe: Recipe, setup: Setup) -> float:
    """Seconds of one optimizer step on a fresh batch. Raises RuntimeError when it was skipped."""
    batch, rows = random_batch(recipe, state.step), recipe.micro_batch_rows
    verdicts = []
    seconds = seconds_of(
        lambda: verdicts.append(train_step(state, batch, Multipliers(), setup.machine, micro_batch_rows=rows).verdict),
        setup.machine,
    )
    if verdicts != ["step"]:
        raise RuntimeError("a step of the benchmark was not finite, so its time means nothing: report it")
    return seconds


def _peak(setup: Setup) -> float:
    return measure_peak_flops(setup.machine, 256 if setup.quick else 2048)


def _starts(setup: Setup) -> list[Measure]:
    """Cold and warm starts in turns, each in a process of its own; where nothing is compiled there is one kind only."""
    kinds = {"cold": "everything compiled", "warm": "the compiler's cache is there"}
    seconds: dict[str, list[float]] = {kind: [] for kind in (kinds if setup.machine.compile else ("eager",))}
    started: Started | None = None
    for _ in range(1 if setup.quick else STARTS):
        with tempfile.TemporaryDirectory(prefix="quern-bench-") as cache:
            for kind in seconds:
                started = first_step(setup.machine, setup.seed, setup.quick, setup.batch_tokens, cache)
                seconds[kind].append(started.first_step_seconds)
    measures = [
        Measure(f"start to first step, {kind}", "s", tuple(values), kinds.get(kind, kind))
        for kind, values in seconds.items()
    ]
    if started is not None and started.peak_memory_bytes is not None:
        measures.append(Measure("peak memory", "MB", (started.peak_memory_bytes / 1e6,), "of that process"))
    return measures
