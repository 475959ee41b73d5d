"""Checks whether torch.compile works on this machine, by compiling a tiny function."""

from __future__ import annotations

import logging
import warnings
from functools import cache

import torch


@cache
def problem(device_type: str) -> str | None:
    """Compile and run a tiny function.

    Args:
        device_type: "cpu", "cuda" or "mps".

    Returns:
        None when torch.compile works on this device, else the reason in at most 120 characters.
    """
    if device_type == "mps":
        return "not supported by PyTorch on MPS for this model"
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)  # read when torch._inductor is imported
    _configure()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(_probe, dynamic=False)(torch.ones(8, device=device_type))
    except Exception as error:  # the toolchain's own kinds: no compiler, a broken header, no Triton
        text = str(error).strip().splitlines() or [type(error).__name__]
        return text[0][:120]
    return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + 1


def _configure() -> None:
    """Allow fused multiply-add on CPUs (saves a third of pointwise time), and skip slow vector-instruction tests."""
    import torch._inductor.config

    torch._inductor.config.cpp.enable_floating_point_contract_flag = "fast"
    torch._inductor.config.cpp.vec_isa_ok = True
