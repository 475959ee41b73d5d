"""Context of the sections of `quern bench gpu`, the device's limits, and the error of a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quern.bench.measure import Bench, call_seconds
from quern.machine import Machine, measure_peak_flops

ROUNDS, QUICK_ROUNDS = 5, 2
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
    """Context of a section. data: text or tokens to train on; tokenizer: of the tokens."""

    limits: Limits
    data: str | None = None
    tokenizer: str | None = None
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
