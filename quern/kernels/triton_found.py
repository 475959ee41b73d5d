"""Whether Triton is there: torch's builds for CUDA on Linux bring it along, others do not.

Files named *_triton.py import it at their head, so they are imported by the first call only.
"""

import importlib.util
from functools import cache

import torch


@cache
def _found() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.compiler.assume_constant_result  # the compiler need not look into how Python finds packages
def triton_found() -> bool:
    return _found()
