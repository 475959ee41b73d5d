"""Whether Triton is installed: torch's builds for CUDA on Linux include it, others do not.

Files named *_triton.py import it at the top, so only the first call imports them.
"""

import importlib.util
from functools import cache

import torch


@cache
def _found() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.compiler.assume_constant_result  # the compiler need not trace how Python finds packages
def triton_found() -> bool:
    return _found()
