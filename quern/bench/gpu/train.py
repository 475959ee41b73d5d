"""Sections of `quern bench gpu` about training: speed, memory and where the time goes, in bf16 and in FP8.

The model is the `gpt` recipe at depth 12: width 768, 6 heads of 128, vocabulary 32,768, windows SSSL, rows of 2,048
tokens, 32 of them a step in one micro-batch, random tokens. A step is forward, loss, backward, gradient norm, update.
MFU is the model's FLOPs (6 for each weight of matrices and head, 12 · heads · head dim · span for a layer's attention,
causality not subtracted) over the data sheet's bf16 peak, and over what a large product reached here; in FP8 as well,
whose own peak is twice that. Where the time goes is the share of kernels, by name, in a step; idle is what remains.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from quern.bench.gpu.setup import Bench
from quern.bench.material import random_batch
from quern.bench.record import Measure
from quern.data.batch import Batch
from quern.model.count import flops_per_token
from quern.model.fp8 import use_fp8
from quern.model.gpt import GPT
from quern.optim.groups import table
from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.recipe import ModelRecipe, Recipe, TrainRecipe
from quern.resolve import resolve
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import train_step

ROWS, STEPS = 32, 20
KINDS = {
    "rotation": ("turn_kernel", "norm_gradient_kernel"),
    "attention": (
        "flash",
        "fmha",
        "forward_kernel",
        "query_gradient",
        "key_gradients",
        "statistics_k",
        "attend_",
        "sdpa",
    ),
    "loss": ("loss_kernel",),
    "matrix products": (
        "gemm",
        "nvjet",
        "cutlass",
        "xmma",
        "cublas",
        "scaled_mm",
        "::mm",
        "::bmm",
        "::baddbmm",
        "::addmm",
    ),
    "copies": ("memcpy", "memset", "::copy_"),
}
"""Kinds of work by parts of a kernel's name, the first that fits; the rest is elementwise work and reductions."""


def recipe_of(bench: Bench, vocab_size: int, steps: int, depth: int = 12) -> Recipe:
    """The recipe at that depth, resolved."""
    model = ModelRecipe(vocab_size=vocab_size)
    rows = ROWS
    if bench.quick:
        model, rows, depth = ModelRecipe(width=32, heads=2, head_dim=16, vocab_size=vocab_size, context=64), 2, 2
    context = model.context or 2048
    train = TrainRecipe(batch_tokens=rows * context, micro_batch_tokens=rows * context, steps=steps)
    model = replace(model, context=context)
    parts: dict[str, Any] = {"make_model": GPT, "make_rules": table, "make_schedule": warmup_stable_decay}
    return resolve(Recipe(name="gpu", depth=depth, seed=bench.seed, model=model, train=train, **parts))


def step(state: TrainState, batch: Batch, multipliers: Multipliers, bench: Bench) -> float:
    """One optimizer step on all rows at once → the loss. Raises RuntimeError when it was skipped."""
    result = train_step(state, batch, multipliers, bench.machine, micro_batch_rows=len(batch.tokens))
    if result.verdict != "step":
        raise RuntimeError(f"a step was not finite (loss {result.loss}, gradient norm {result.grad_norm})")
    return result.loss


def training_bf16(bench: Bench) -> Iterator[Measure]:
    return training(bench, fp8=False)


def training_fp8(bench: Bench) -> Iterator[Measure]:
    return training(bench, fp8=True)


def training(bench: Bench, *, fp8: bool) -> Iterator[Measure]:
    """tokens/s, MFU, memory, graphs compiled, and shares of the time. The note of the first says what is in FP8."""
    machine, note = bench.machine, ""
    recipe = recipe_of(bench, 512 if bench.quick else 32_768, 1000)
    model = build_model(recipe, machine, recipe.seed)
    if fp8:
        note = str(use_fp8(model))
    state = build_state(recipe, machine, model)
    if machine.compile:
        model.compile(dynamic=False)
    batches = itertools.cycle([random_batch(recipe, seed) for seed in range(4)])
    start = time.perf_counter()
    losses = [step(state, next(batches), Multipliers(), bench)]
    yield Measure("start to first step: time", "s", (time.perf_counter() - start,), note)
    losses += [step(state, next(batches), Multipliers(), bench) for _ in range(3)]
    graphs = compiled_graphs()
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(2 if bench.quick else STEPS):
        machine.synchronize()
        start = time.perf_counter()
        losses.append(step(state, next(batches), Multipliers(), bench))
        machine.synchronize()
        seconds.append(time.perf_counter() - start)
    yield from _figures(bench, recipe, seconds)
    if machine.device.type == "cuda":
        yield Measure("memory: at most", "GB", (torch.cuda.max_memory_allocated() / 1e9,))
    yield Measure("loss: last of those steps", "nats", (losses[-1],), "random tokens, four batches over and over")
    yield from shares(lambda: step(state, next(batches), Multipliers(), bench), bench, float(np.median(seconds)))
    yield Measure("graphs: compiled after the fourth step", "graphs", (float(compiled_graphs() - graphs),))


def _figures(bench: Bench, recipe: Recipe, seconds: list[float]) -> Iterator[Measure]:
    batch_tokens, flops = recipe.train.batch_tokens, flops_per_token(recipe)
    assert batch_tokens
    speeds = tuple(batch_tokens / one for one in seconds)
    yield Measure("training: speed", "tokens/s", speeds)
    if bench.limits.sheet is not None:
        yield Measure(
            "MFU: of the data sheet", "%", tuple(100 * speed * flops / bench.limits.sheet for speed in speeds)
        )
    yield Measure("MFU: of a large product", "%", tuple(100 * speed * flops / bench.limits.flops for speed in speeds))


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def shares(job: Any, bench: Bench, usual: float, steps: int = 3) -> Iterator[Measure]:
    """Percent of the clock by kind of kernel, and the kernels that take most; profiled over a few steps."""
    bench.check_time()
    on_gpu = bench.machine.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as taken:
        for _ in range(steps):
            job()
        bench.machine.synchronize()
    kernels: dict[str, float] = {}
    for event in taken.key_averages():
        # The time of a kernel also stands at the operator that launched it: on a GPU kernels alone are counted.
        if on_gpu and event.device_type.name == "CUDA":
            kernels[event.key] = kernels.get(event.key, 0.0) + event.self_device_time_total / 1e6 / steps
        elif not on_gpu:
            kernels[event.key] = kernels.get(event.key, 0.0) + event.self_cpu_time_total / 1e6 / steps
    by_kind: dict[str, float] = {}
    for name, spent in kernels.items():
        by_kind[kind_of_kernel(name)] = by_kind.get(kind_of_kernel(name), 0.0) + spent
    for kind, spent in sorted(by_kind.items(), key=lambda item: -item[1]):
        yield Measure(f"time: {kind}", "%", (100 * spent / usual,))
    yield Measure("time: idle", "%", (100 * max(0.0, 1 - sum(kernels.values()) / usual),))
    for name, spent in sorted(kernels.items(), key=lambda item: -item[1])[:15]:
        yield Measure(f"kernel {name[:70]}: time", "%", (100 * spent / usual,))


def kind_of_kernel(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lowered for part in parts)), "elementwise")
