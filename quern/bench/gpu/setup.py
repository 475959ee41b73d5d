"""Settings of the sections of `quern bench gpu`, the timer and the error that they share, and the device's limits.

A call is timed by `triton.testing.do_bench` on CUDA and by `torch.utils.benchmark` elsewhere (--quick). Calls that are
compared alternate over some rounds. A first call, which compiles and tunes, is not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from quern.bench.record import alternate
from quern.machine import Machine, measure_peak_flops

ROUNDS, QUICK_ROUNDS = 5, 2
WARM_UP_MS, MEASURED_MS = 5, 20
DATA_SHEET = {"A100": 312e12, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s from NVIDIA's data sheets. The longest key that is part of a device's name counts."""


class OutOfTime(Exception):
    """A section has used its time; the record keeps its figures so far."""


@dataclass(frozen=True)
class Limits:
    """FLOP/s of a large product in the compute dtype, bytes/s of a large copy, and the data sheet's FLOP/s if known."""

    flops: float
    bytes_per_second: float
    sheet: float | None


@dataclass(frozen=True)
class Bench:
    """Settings of a section.

    Attributes:
        quick: Use tiny sizes, whose figures mean nothing.
        data: Text or tokens to train on; `tokenizer` is that of the tokens.
        deadline: When the section has to stop, on `time.monotonic`.
        problems: Lines about calls that failed.
    """

    machine: Machine
    quick: bool
    seed: int
    data: str | None
    tokenizer: str | None
    limits: Limits
    deadline: float
    problems: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.machine.device.type == "cuda"

    def check_time(self) -> None:
        """Raises OutOfTime after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Returns standard normal numbers on the device, in the compute dtype by default."""
        numbers = torch.Generator(device=self.machine.device).manual_seed(self.seed + seed)
        x = torch.randn(shape, generator=numbers, device=self.machine.device)
        return x.to(dtype or self.machine.dtype)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=False) if self.machine.compile else function

    def seconds(self, jobs: Mapping[str, Callable[[], object]], graph: bool = False) -> dict[str, tuple[float, ...]]:
        """Returns the seconds per call of each job in each round; a job that fails becomes a problem.

        Args:
            jobs: Functions to call.
            graph: Time each job as a CUDA graph, which does without the cost of kernel launches.
        """
        working = {}
        for name, job in jobs.items():
            self.check_time()
            try:
                call_seconds(job, self.machine, graph)
            except Exception as error:  # kernels, drivers and the compiler raise errors of any type
                self.problems.append(f"{name}: {first_line(error)}")
            else:
                working[name] = lambda job=job: call_seconds(job, self.machine, graph)
        return alternate(QUICK_ROUNDS if self.quick else ROUNDS, working)

    def passes(
        self, forwards: Mapping[str, Callable[[], Tensor]], inputs: Sequence[Tensor], grad: Tensor
    ) -> dict[str, tuple[float, ...]]:
        """Returns the seconds of "<name> forward" and "<name> backward": the time of both passes less the forward."""
        both = {name: lambda f=f: torch.autograd.grad(f(), inputs, grad) for name, f in forwards.items()}
        taken = self.seconds({**{f"{name} forward": f for name, f in forwards.items()}, **both})
        found = {}
        for name in (name for name in both if name in taken):
            found[f"{name} forward"] = first = taken[f"{name} forward"]
            found[f"{name} backward"] = tuple(max(a - b, 1e-9) for a, b in zip(taken[name], first, strict=True))
        return found


def call_seconds(call: Callable[[], object], machine: Machine, graph: bool = False) -> float:
    """Returns the median seconds of a call on CUDA, or those of one call elsewhere."""
    if machine.device.type != "cuda":
        return Timer("call()", globals={"call": call}, num_threads=machine.threads).timeit(1).median
    from triton.testing import do_bench, do_bench_cudagraph

    timer: Any = do_bench_cudagraph if graph else partial(do_bench, warmup=WARM_UP_MS)
    return timer(call, rep=MEASURED_MS, return_mode="median") / 1e3


def measure_limits(machine: Machine, quick: bool) -> Limits:
    """Measures the device on random numbers: on zeros a GPU draws less power and runs faster than on data."""
    size, copied = (256, 2**20) if quick else (8192, 2**31)
    x = torch.randint(0, 100, (copied,), device=machine.device, dtype=torch.int8)
    y = torch.empty_like(x)
    copy = min(call_seconds(lambda: y.copy_(x), machine) for _ in range(3))
    return Limits(measure_peak_flops(machine, size), 2 * copied / copy, data_sheet(machine))


def data_sheet(machine: Machine) -> float | None:
    """Returns the data sheet's bf16 FLOP/s, None for an unknown device or another compute dtype."""
    name = str(machine.describe()["processor"])
    known = [part for part in DATA_SHEET if part in name]
    return DATA_SHEET[max(known, key=len)] if known and machine.dtype == torch.bfloat16 else None


def worst_error(
    function: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> float:
    """Returns the largest relative error (2-norm) of the output and the gradients, against `plain` in fp32."""

    def with_gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]

    worst = 0.0
    for x, e in zip(with_gradients(function, inputs[0].dtype), with_gradients(plain, torch.float32), strict=True):
        size = e.norm().item()
        if size >= 1e-6 * math.sqrt(e.numel()):  # smaller gradients are zero except for rounding
            error = (x.float() - e).norm().item() / size
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
