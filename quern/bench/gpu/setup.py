"""What the sections of `quern bench gpu` share: where they run, how long they may, and how a GPU is timed.

A GPU works through a queue, so a call is timed by events in that queue, not by the clock around it; on a CPU, where the
quick version runs, by the clock. Each figure is a mean over calls enough for some milliseconds, taken once a round;
what is compared takes turns. First calls, which compile and tune, never count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quern.bench.record import alternate
from quern.machine import Machine

MEASURED_SECONDS = 0.02  # of calls that make one value of one figure
MOST_CALLS = 50
# What the vendor's data sheets promise in dense bf16, FLOP/s; a name is matched by its longest part that stands here.
DATA_SHEET = {"A100": 312e12, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12, "B200": 2250e12}


class OutOfTime(Exception):
    """A section has used up its time; what it measured so far stands."""


@dataclass(frozen=True)
class Limits:
    """What the device itself does at most, measured: FLOP/s of a large matrix product in the compute dtype, and bytes/s
    of a large copy, read and written ones; sheet: FLOP/s by the data sheet, None where it is not known."""

    flops: float
    bytes_per_second: float
    sheet: float | None


@dataclass(frozen=True)
class Bench:
    """quick: tiny sizes, whose figures mean nothing; data: text or tokens to train on; tokenizer: of tokens; deadline:
    when the running section has to stop, on `time.monotonic`; problems: what went wrong beside what was measured."""

    machine: Machine
    quick: bool
    seed: int
    data: str | None
    tokenizer: str | None
    limits: Limits
    deadline: float
    problems: list[str] = field(default_factory=list)

    def check_time(self) -> None:
        """Raises OutOfTime past the deadline; called between measurements."""
        if time.monotonic() > self.deadline:
            raise OutOfTime

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Standard normal numbers on the device, in the compute dtype unless another is asked for."""
        numbers = torch.Generator(device=self.machine.device).manual_seed(self.seed + seed)
        x = torch.randn(shape, generator=numbers, device=self.machine.device)
        return x.to(dtype or self.machine.dtype)

    def rounds(self, jobs: Mapping[str, Timed], rounds: int = 5) -> dict[str, tuple[float, ...]]:
        """Seconds a call of each job, once for each round; the jobs take turns."""
        rounds = 2 if self.quick else rounds
        most = 1 if self.quick else MOST_CALLS
        timed: dict[str, Callable[[], float]] = {}
        for name, job in jobs.items():
            self.check_time()
            job.seconds(1, self.machine)  # compiles and tunes
            usual = job.seconds(2, self.machine)
            calls = max(1, min(most, round(MEASURED_SECONDS / max(usual, 1e-6))))
            timed[name] = lambda job=job, calls=calls: job.seconds(calls, self.machine)
        return alternate(rounds, timed)

    def works(self, name: str, job: Timed) -> bool:
        """Runs it once; what it raises is noted, and then it is left out."""
        try:
            job.seconds(1, self.machine)
        except Exception as error:  # whatever a kernel's author, a driver or the compiler thought of
            self.problems.append(f"{name}: {first_line(error)}")
            return False
        return True


@dataclass(frozen=True)
class Timed:
    """A call to time. before: run ahead of each call and not timed; what it returns is the call's argument."""

    call: Callable[[Any], object]
    before: Callable[[], Any] = lambda: None

    def seconds(self, calls: int, machine: Machine) -> float:
        """Mean seconds of a call."""
        if machine.device.type != "cuda":
            spent = 0.0
            for _ in range(calls):
                argument = self.before()
                machine.synchronize()
                start = time.perf_counter()
                self.call(argument)
                machine.synchronize()
                spent += time.perf_counter() - start
            return spent / calls
        pairs = []
        for _ in range(calls):
            argument = self.before()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.call(argument)
            end.record()
            pairs.append((start, end))
        machine.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) / calls / 1e3


def timed(call: Callable[[], object]) -> Timed:
    """Without anything before it."""
    return Timed(lambda _: call())


def measure_limits(machine: Machine, quick: bool) -> Limits:
    """On random numbers: on zeros a GPU draws less power and runs faster than data ever will."""
    size, copied = (256, 2**20) if quick else (8192, 2**31)
    numbers = torch.Generator(device=machine.device).manual_seed(0)
    a = torch.randn((size, size), generator=numbers, device=machine.device).to(machine.dtype)
    x = torch.randint(0, 100, (copied,), generator=numbers, device=machine.device, dtype=torch.int8)
    y = torch.empty_like(x)
    product, copy = timed(lambda: torch.mm(a, a)), timed(lambda: y.copy_(x))
    for job in (product, copy):
        job.seconds(2, machine)
    flops = 2 * size**3 / min(product.seconds(5, machine) for _ in range(3))
    moved = 2 * copied / min(copy.seconds(5, machine) for _ in range(3))
    return Limits(flops, moved, data_sheet(machine))


def data_sheet(machine: Machine) -> float | None:
    name = str(machine.describe()["processor"])
    known = [part for part in DATA_SHEET if part in name]
    return DATA_SHEET[max(known, key=len)] if known and machine.dtype == torch.bfloat16 else None


def peak_bytes(machine: Machine, call: Callable[[], object]) -> int | None:
    """The most device memory that a call holds beyond what is held already; None where there is no such count."""
    if machine.device.type != "cuda":
        call()
        return None
    machine.synchronize()
    before = torch.cuda.memory_allocated(machine.device)
    torch.cuda.reset_peak_memory_stats(machine.device)
    call()
    machine.synchronize()
    return torch.cuda.max_memory_allocated(machine.device) - before


def first_line(error: BaseException) -> str:
    """What an error says, short."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
