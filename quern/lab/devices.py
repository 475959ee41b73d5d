"""The devices of a study: options, and how several workers share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from quern import machine as machines
from quern.flags.check_flags import UNSAID


@dataclass(frozen=True)
class DeviceOptions:
    """The device that computes."""

    device: Annotated[Literal["cpu", "cuda", "mps"] | None, UNSAID] = None
    """Default: the fastest device available."""
    dtype: Annotated[Literal["bf16", "fp32"] | None, UNSAID] = None
    """Default: bf16 if it is measured to be faster."""
    threads: Annotated[int | None, UNSAID] = None
    """CPU threads of all workers. Default: one per core."""
    compile: bool = True
    """--no-compile runs eagerly."""

    def arguments(self, workers: int = 1) -> dict[str, Any]:
        """Arguments of `machine.detect` for one of some workers, which share the CPU's threads."""
        machine = machines.detect(self.device, self.dtype, self.compile, self.threads)
        if machine.device.type == "cuda" and workers > torch.cuda.device_count():
            raise ValueError(f"--workers {workers} needs as many GPUs, and there are {torch.cuda.device_count()}")
        return {
            "device": self.device,
            "dtype": self.dtype,
            "compile": self.compile,
            "threads": max(1, machine.threads // workers),
        }
