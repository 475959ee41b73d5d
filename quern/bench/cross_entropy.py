"""Benchmark of the loss: head, softcap and cross-entropy with their gradients, chunked against all logits at once.

Paths: `chunked` (what the model uses), `full` (the plain twin, eager), `full, compiled` (the plain twin through the
compiler). Time: milliseconds forward and backward, the paths in turns. Memory: each path in a process of its own, the
most that it holds during a call beyond what it held before, when its compiler had run and everything freed had been
given back; both gradients are among it. On a CPU that is resident memory, which only Linux can measure so; elsewhere
memory is left out. On CUDA it is what the allocator handed out.

`python -m quern.bench.cross_entropy '{…}'` is that process; it prints the number of bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quern
from quern.bench.record import Measure, Outcome, Setup, alternate, ratios, seconds_of
from quern.kernels.cross_entropy import cross_entropy as chunked
from quern.kernels.cross_entropy import cross_entropy_plain
from quern.kernels.softcap import TanhCap
from quern.machine import Machine, detect, environment

CAP = TanhCap(15.0)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def cross_entropy(setup: Setup) -> Outcome:
    sizes = (512, 32, 4096) if setup.quick else (4096, 256, 32768)
    machine, names = setup.machine, paths(setup.machine)
    jobs = {name: call(name, machine, sizes, setup.seed) for name in names}
    taken = alternate(setup.rounds, {name: lambda job=job: seconds_of(job, machine) for name, job in jobs.items()})
    del jobs
    measures = [Measure(f"{name}: time", "ms", tuple(1e3 * one for one in taken[name])) for name in names]
    whole = [name for name in names if name != "chunked"]
    measures += [Measure(f"{name} / chunked: time", "×", ratios(taken[name], taken["chunked"])) for name in whole]
    held = {name: bytes_in_its_own_process(name, machine, sizes, setup.seed) for name in names}
    if any(one is None for one in held.values()):
        setup.log("memory is left out: this system does not say what a single call takes")
    else:
        memory = {name: one for name, one in held.items() if one is not None}
        measures += [Measure(f"{name}: memory", "MB", (one / 1e6,)) for name, one in memory.items()]
        base = memory["chunked"]
        measures += [Measure(f"{name} / chunked: memory", "×", (memory[name] / base,)) for name in whole]
    tokens, width, vocabulary = sizes
    return Outcome(measures, {"tokens": tokens, "width": width, "vocabulary": vocabulary, "softcap": str(CAP)})


def paths(machine: Machine) -> list[str]:
    return ["chunked", "full", *(["full, compiled"] if machine.compile else [])]


def call(name: str, machine: Machine, sizes: tuple[int, int, int], seed: int) -> Callable[[], None]:
    """One loss with its gradients by one path."""
    tokens, width, vocabulary = sizes
    numbers = machine.generator(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(machine.device, machine.dtype).requires_grad_()

    x_ND, weight_VD = random(tokens, width), random(vocabulary, width)
    targets_N = torch.randint(0, vocabulary, (tokens,), generator=numbers).to(machine.device)
    scale_N = torch.full((tokens,), 1 / tokens, device=machine.device)
    loss = loss_of(name)

    def once() -> None:
        x_ND.grad = weight_VD.grad = None
        loss(x_ND, weight_VD, targets_N, scale_N).backward()

    return once


def loss_of(name: str) -> Loss:
    def full(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scale_N: Tensor) -> Tensor:
        return (cross_entropy_plain(x_ND, weight_VD, targets_N, CAP) * scale_N).sum()

    losses: dict[str, Loss] = {
        "chunked": lambda x_ND, weight_VD, targets_N, scale_N: chunked(x_ND, weight_VD, targets_N, scale_N, CAP)[0],
        "full": full,
        "full, compiled": torch.compile(full, dynamic=False),
    }
    return losses[name]


def bytes_in_its_own_process(name: str, machine: Machine, sizes: tuple[int, int, int], seed: int) -> int | None:
    """What one call of a path takes at its peak. Raises RuntimeError with the process's last words when it fails."""
    order = {
        "name": name,
        "sizes": sizes,
        "seed": seed,
        "device": machine.device.type,
        "dtype": {"bfloat16": "bf16", "float32": "fp32"}[str(machine.dtype).removeprefix("torch.")],
        "compile": machine.compile,
        "threads": machine.threads,
    }
    paths = [str(Path(quern.__file__).parent.parent), environment().get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "quern.bench.cross_entropy", json.dumps(order)],
        capture_output=True,
        env={**environment(), "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        encoding="utf-8",
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-5:]
        raise RuntimeError("a process of the benchmark failed: " + " | ".join(said))
    return json.loads(done.stdout.splitlines()[-1])


def measure(order: dict[str, Any]) -> int | None:
    """What the process does."""
    machine = detect(order["device"], order["dtype"], order["compile"], order["threads"])
    once = call(order["name"], machine, tuple(order["sizes"]), order["seed"])
    once()  # compiles
    return peak_bytes(once, machine)


def peak_bytes(job: Callable[[], None], machine: Machine) -> int | None:
    """The most memory that a call held beyond what was held before it; None where the system does not say."""
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job()
        return torch.cuda.max_memory_allocated() - before
    try:
        with contextlib.suppress(AttributeError):  # no glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is resident from here on
        before = _resident("VmRSS")
        job()
        return _resident("VmHWM") - before
    except OSError:
        return None


def _resident(what: str) -> int:
    """Bytes, by the name of a line in /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
