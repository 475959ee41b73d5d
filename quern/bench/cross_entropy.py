"""Benchmark of the loss: head, softcap and cross-entropy with their gradients, in chunks and from all logits at once.

Paths: `chunked` (what the model uses), `full` (the plain definition, eager), `full, compiled`. Time: milliseconds of a
forward and backward pass; the paths alternate. Memory: the most that one call holds beyond what was held before it,
both gradients included, after the compiler has run; each path runs in a process of its own (`python -m
quern.bench.cross_entropy`). On a CPU that is resident memory, which only Linux reports. On CUDA it is allocated memory.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quern.bench.child import machine_flags, serve, start
from quern.bench.record import Measure, Outcome, Setup, ratios, scaled
from quern.kernels.cross_entropy import cross_entropy as chunked
from quern.kernels.cross_entropy import cross_entropy_plain
from quern.kernels.softcap import TanhCap
from quern.machine import Machine, detect

CAP = TanhCap(15.0)


def cross_entropy(setup: Setup) -> Outcome:
    machine, sizes = setup.machine, (512, 32, 4096) if setup.quick else (4096, 256, 32768)
    whole = ["full", *(["full, compiled"] if machine.compile else [])]
    names = ["chunked", *whole]
    taken = setup.seconds({name: call(name, machine, sizes, setup.seed) for name in names})
    measures = [Measure(f"{name}: time", "ms", scaled(1e3, taken[name])) for name in names]
    measures += [Measure(f"{name} / chunked: time", "×", ratios(taken[name], taken["chunked"])) for name in whole]
    order = {"sizes": sizes, "seed": setup.seed, "machine": machine_flags(machine)}
    held: dict[str, Any] = {}
    for name in names:
        with start("quern.bench.cross_entropy", name, order | {"name": name}) as process:
            held[name] = process.answer()["bytes"]
    if None in held.values():
        setup.log("memory is left out: this system does not report what a single call takes")
    else:
        measures += [Measure(f"{name}: memory", "MB", (held[name] / 1e6,)) for name in names]
        measures += [Measure(f"{name} / chunked: memory", "×", (held[name] / held["chunked"],)) for name in whole]
    tokens, width, vocabulary = sizes
    return Outcome(measures, {"tokens": tokens, "width": width, "vocabulary": vocabulary, "softcap": str(CAP)})


def call(name: str, machine: Machine, sizes: tuple[int, int, int], seed: int) -> Callable[[], None]:
    """Returns a function that computes one loss with its gradients by the named path."""
    tokens, width, vocabulary = sizes
    numbers = machine.generator(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(machine.device, machine.dtype).requires_grad_()

    def full(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
        return (cross_entropy_plain(x_ND, weight_VD, targets_N, CAP) * scale_N).sum()

    x_ND, weight_VD = random(tokens, width), random(vocabulary, width)
    targets_N = torch.randint(0, vocabulary, (tokens,), generator=numbers).to(machine.device)
    scale_N = torch.full((tokens,), 1 / tokens, device=machine.device)
    loss: Callable[[Tensor, Tensor], Tensor] = {
        "chunked": lambda x_ND, weight_VD: chunked(x_ND, weight_VD, targets_N, scale_N, CAP)[0],
        "full": full,
        "full, compiled": torch.compile(full, dynamic=False),
    }[name]

    def once() -> None:
        x_ND.grad = weight_VD.grad = None
        loss(x_ND, weight_VD).backward()

    return once


def answers(order: dict[str, Any], _: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Runs in a process of its own: answers with the memory of one call."""
    machine = detect(**order["machine"])
    once = call(order["name"], machine, tuple(order["sizes"]), order["seed"])
    once()  # compiles
    yield {"bytes": peak_bytes(once, machine)}


def peak_bytes(job: Callable[[], object], machine: Machine) -> int | None:
    """Returns the most memory that a call held beyond what was held before it, or None if the system does not say."""
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job()
        return torch.cuda.max_memory_allocated() - before
    try:
        with contextlib.suppress(AttributeError):  # no glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM to VmRSS
        before = _resident("VmRSS")
        job()
        return _resident("VmHWM") - before
    except OSError:
        return None


def _resident(field: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    serve(answers)
