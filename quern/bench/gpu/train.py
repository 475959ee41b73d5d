"""Context of the sections of `quern bench gpu`, the device's limits, and the sections about training, in bf16 and FP8.

A step has 32 rows of 2,048 random tokens in one micro-batch of the `gpt` recipe at depth 12. MFU is over the bf16 peak
in FP8, too, whose own peak is twice that. Times of kernels are percent of a step; idle is the rest of the step.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from quern.bench.material import random_batch
from quern.bench.measure import Bench, Figure, call_seconds, figure, seconds_of
from quern.bench.options import GpuOptions
from quern.bench.quality import QUICK_MINUTES, trained
from quern.bench.train import take_step
from quern.machine import Machine, measure_peak_flops, peak_memory, reset_peak_memory
from quern.model.count import FlopCounter
from quern.model.fp8 import use_fp8
from quern.recipe import ModelRecipe, Resolved, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.train.state import build_model, build_state, compile_model

DATA_SHEET = {"A100": 312e12, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s from NVIDIA's data sheets. The longest key that is part of a device's name counts."""


@dataclass(frozen=True)
class Limits:
    """FLOP/s of a large product in the compute dtype, bytes/s of a large copy, and the data sheet's FLOP/s if known."""

    flops: float
    bytes_per_second: float
    sheet: float | None


@dataclass(frozen=True, kw_only=True)
class GpuBench(Bench):
    """Context of a section."""

    limits: Limits
    options: GpuOptions = field(default_factory=GpuOptions)
    problems: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.machine.device.type == "cuda"


def measure_limits(machine: Machine, quick: bool) -> Limits:
    """Measures the device on random numbers: on zeros a GPU draws less power and runs faster than on data."""
    size, copied = (256, 2**20) if quick else (8192, 2**31)
    x = torch.randint(0, 100, (copied,), device=machine.device, dtype=torch.int8)
    y = torch.empty_like(x)
    copy = min(call_seconds(lambda: y.copy_(x), machine, quick) for _ in range(3))
    return Limits(measure_peak_flops(machine, size), 2 * copied / copy, data_sheet(machine))


def data_sheet(machine: Machine) -> float | None:
    """Returns the data sheet's bf16 FLOP/s, None for an unknown device or another compute dtype."""
    name = str(machine.describe()["processor"])
    known = [part for part in DATA_SHEET if part in name]
    return DATA_SHEET[max(known, key=len)] if known and machine.dtype == torch.bfloat16 else None


ROWS, STEPS, PROFILED_STEPS = 32, 20, 3
KINDS = {
    "rotation": "turn_kernel norm_gradient_kernel",
    "attention": "flash fmha forward_kernel query_gradient key_gradients statistics_k attend_ sdpa",
    "loss": "loss_kernel",
    "matrix products": "gemm nvjet cutlass xmma cublas scaled_mm ::mm ::bmm ::baddbmm ::addmm",
    "copies": "memcpy memset ::copy_",
}
"""Kinds of work by parts of a kernel's name, of which the first match counts; other kernels are elementwise work."""


def recipe_of(bench: GpuBench) -> Resolved:
    """Returns the resolved recipe at depth 12, or a tiny one."""
    rows, depth, context, sizes = ROWS, 12, 2048, ModelRecipe(vocab_size=32_768)
    if bench.quick:
        rows, depth, context, sizes = 2, 2, 64, ModelRecipe(width=32, heads=2, head_dim=16, vocab_size=512)
    model = replace(sizes, context=context)
    train = TrainRecipe(batch_tokens=rows * context, micro_batch_tokens=rows * context, steps=1000)
    return resolve(replace(RECIPE, name="gpu", depth=depth, seed=bench.seed, model=model, train=train))


def training(bench: GpuBench, fp8: bool) -> Iterator[Figure]:
    """tokens/s, MFU, memory, compiled graphs, and time by kernel. The first note says what is computed in FP8."""
    machine, recipe = bench.machine, recipe_of(bench)
    model = build_model(recipe, machine, recipe.seed)
    note = str(use_fp8(model)) if fp8 else ""
    state = build_state(recipe, machine, model)
    compile_model(model, machine)
    batches = itertools.cycle([random_batch(recipe, seed) for seed in range(4)])

    def step() -> tuple[float, float]:
        return take_step(state, recipe, machine, next(batches))

    yield figure("start to first step: time", "s", seconds_of(step), note)
    for _ in range(3):
        step()
    graphs = compiled_graphs()
    reset_peak_memory(machine.device)
    seconds, losses = np.array([step() for _ in range(2 if bench.quick else STEPS)]).T
    batch_tokens, flops = recipe.train.batch_tokens, FlopCounter(recipe).per_token()
    yield figure("training: speed", "tokens/s", batch_tokens / seconds)
    for place, peak in (("the data sheet", bench.limits.sheet), ("a large product", bench.limits.flops)):
        if peak is not None:
            yield figure(f"MFU: of {place}", "%", 100 * batch_tokens * flops / peak / seconds)
    if bench.on_gpu:
        yield figure("memory: at most", "GB", peak_memory(machine.device) / 1e9)
    yield figure("loss: last of those steps", "nats", losses[-1], "random tokens, four batches over and over")
    yield from kernel_times(step, bench, float(np.median(seconds)))
    yield figure("graphs: compiled after the fourth step", "graphs", compiled_graphs() - graphs)


training_bf16, training_fp8 = partial(training, fp8=False), partial(training, fp8=True)


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def kernel_times(step: Callable[[], object], bench: GpuBench, usual: float) -> Iterator[Figure]:
    """Percent of a step's usual seconds, by kind of kernel and for the 15 kernels that take longest."""
    bench.check_time()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.on_gpu else [])]) as taken:
        for _ in range(PROFILED_STEPS):
            step()
    kernels: Any = Counter()  # of floats
    kinds: Any = Counter()
    for event in taken.key_averages():
        # An operator's device time includes that of its kernels: on a GPU only kernels count.
        if not bench.on_gpu or event.device_type.name == "CUDA":
            spent = event.self_device_time_total if bench.on_gpu else event.self_cpu_time_total
            share = spent / 1e4 / PROFILED_STEPS / usual
            kernels[f"kernel {event.key[:70]}"] += share
            kinds[f"time: {kind_of_kernel(event.key)}"] += share
    kinds["time: idle"] = max(0.0, 100 - sum(kinds.values()))
    yield from (figure(name, "%", share) for name, share in (*kinds.most_common(), *kernels.most_common(15)))


def kind_of_kernel(name: str) -> str:
    found = (kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts.split()))
    return next(found, "elementwise")


REAL_MINUTES = 1.0


def real(bench: GpuBench) -> Iterator[Figure]:
    """Pretrains at depth 12 for a minute, and yields the figures of `quern bench quality`."""
    data, tokenizer = bench.options.data, bench.options.tokenizer
    if data is None:
        bench.problems.append("no text to train on: give --data, a file or folder of text")
        return
    left = max(0.1, (bench.deadline - time.monotonic()) / 60)  # also for the text's preparation, and for compilation
    train = TrainRecipe(minutes=QUICK_MINUTES if bench.quick else min(REAL_MINUTES, left / 4))
    text, depth = replace(RECIPE.text, tokenizer=tokenizer), 1 if bench.quick else 12
    recipe = replace(RECIPE, data=data, text=text, depth=depth, seed=bench.seed, train=train)
    yield from trained(bench, recipe, ("depth", "train.minutes"), bench.options.out, "real run")
