"""Benchmark of causal attention alone: every path there is, at several lengths and windows, forward and
backward.

Paths: `plain` (the definition, whole score matrices in fp32), `quern` (what the model uses on this device:
the blocked path on a CPU), `sdpa` (torch's, with a mask where there is a window). A call gets 4,096 tokens
in all, 4 heads of 64, eager, in the compute dtype; layout changes that a path needs are part of it.
Milliseconds a call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quern.kernels.attention import MaskSpec, attend, attend_plain, attend_sdpa
from quern.stages.bench_record import Measure, Outcome, Setup, alternate, grid, number, ratios, seconds_of

TOKENS, HEADS, HEAD_DIM = 4096, 4, 64
LENGTHS = (256, 512, 1024, 2048)

Attention = Callable[[Tensor, Tensor, Tensor, MaskSpec], Tensor]
PATHS: dict[str, Attention] = {"plain": attend_plain, "quern": attend, "sdpa": attend_sdpa}


def attention(setup: Setup) -> Outcome:
    tokens, lengths = (128, (32, 64)) if setup.quick else (TOKENS, LENGTHS)
    measures: list[Measure] = []
    rows: list[list[str]] = []
    for length in lengths:
        for window in (None, length // 4):
            taken = _measure(setup, tokens // length, length, window)
            place = f"T={length}, window {window or 'full'}"
            row = [str(length), str(window or "full")]
            for name in PATHS:
                for way in ("forward", "backward"):
                    values = tuple(1e3 * one for one in taken[f"{name} {way}"])
                    measures.append(Measure(f"{place}: {name} {way}", "ms", values))
                    row.append(number(measures[-1].median))
            both = {n: _sum(taken[f"{n} forward"], taken[f"{n} backward"]) for n in PATHS}
            faster = Measure(f"{place}: sdpa / quern, both ways", "×", ratios(both["sdpa"], both["quern"]))
            measures.append(faster)
            rows.append([*row, number(faster.median)])
    head = ["T", "window", *(f"{name} {way}" for name in PATHS for way in ("fwd", "bwd")), "sdpa/quern"]
    settings = {"tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM, "paths": list(PATHS)}
    return Outcome(measures, settings, ["  milliseconds a call, medians", *grid(head, rows)])


def _measure(setup: Setup, rows: int, length: int, window: int | None) -> dict[str, tuple[float, ...]]:
    """Seconds by "path way"; the paths take turns."""
    machine = setup.machine
    numbers = machine.generator(setup.seed)
    q, k, v, grad = (
        torch.randn(rows, length, HEADS, HEAD_DIM, generator=numbers).to(machine.device, machine.dtype)
        for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    made: dict[str, Tensor] = {}

    def forward(name: str) -> float:
        return seconds_of(lambda: made.update({name: PATHS[name](q, k, v, MaskSpec(window))}), machine)

    def backward(name: str) -> float:
        if name not in made:  # in rounds that go backwards
            forward(name)
        return seconds_of(lambda: torch.autograd.grad(made.pop(name), inputs, grad), machine)

    jobs: dict[str, Callable[[], float]] = {}
    for name in PATHS:
        jobs[f"{name} forward"] = lambda name=name: forward(name)
        jobs[f"{name} backward"] = lambda name=name: backward(name)
    return alternate(setup.rounds, jobs)


def _sum(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
