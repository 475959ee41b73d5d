"""torch.compile: whether it works on this machine, functions compiled when first called, and how to go without it.

The compiler takes four seconds to import, so nothing here imports it before something is compiled.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage]

from quern.process import waiting

P = ParamSpec("P")
R = TypeVar("R")
TRITON_FOUND = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed: torch's builds for CUDA on Linux include it. Files *_triton.py import it at the top."""
_lock = threading.Lock()
_eager: set[int | None] = set()
"""The threads inside `eager`, in which code runs as it is written; None: in all threads."""


def is_eager() -> bool:
    """Whether functions run as they are written, in this thread."""
    return not _eager.isdisjoint((None, threading.get_ident()))


@contextmanager
def eager() -> Iterator[None]:
    """Runs the body eagerly, including functions that were compiled before.

    PyTorch has one stance for all threads. While one thread is inside, another one runs compiled modules as they are
    written too: slower, with the same results.
    """
    thread = threading.get_ident()
    within = thread in _eager
    set_eager(True, thread)
    try:
        yield
    finally:
        set_eager(within, thread)


def set_eager(eager: bool, thread: int | None = None) -> None:
    """Sets whether code runs without the compiler from now on: in one thread, or in all of them."""
    with _lock:
        (_eager.add if eager else _eager.discard)(thread)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled yet
            torch.compiler.set_stance("force_eager" if _eager else "default")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function`, which torch.compile compiles at its first call, and again for other shapes."""

    @cache
    def built() -> Callable[P, R]:
        return torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or is_eager():  # inside another compiled function this one is a part of it
            return function(*args, **kwargs)
        return built()(*args, **kwargs)

    return call


def in_eager_inference() -> bool:
    """Whether nobody traces or differentiates this code, so that an operator's plain function does as well.

    The first call of an operator outside a compiled function imports the compiler, for which a reply need not wait.
    """
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


untraced = _disable_dynamo
"""Decorates a function that torch.compile does not trace (torch.compiler.disable would import the compiler at once)."""


@cache
def problem(device_type: str) -> str | None:
    """Compiles a tiny function on "cpu", "cuda" or "mps". Returns None if that works, else the reason in short."""
    if device_type == "mps":
        return "not supported by PyTorch on MPS for this model"
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)  # read when torch._inductor is imported
    import torch._inductor.config

    # Fused multiply-add on CPUs saves a third of pointwise time. The tests of vector instructions are slow.
    torch._inductor.config.cpp.enable_floating_point_contract_flag = "fast"
    torch._inductor.config.cpp.vec_isa_ok = True
    try:
        with warnings.catch_warnings(), waiting("PyTorch's compiler, which compiles a function on trial"):
            warnings.simplefilter("ignore")
            torch.compile(_probe, dynamic=False)(torch.ones(8, device=device_type))
    except Exception as error:  # the toolchain's own kinds: no compiler, a broken header, no Triton
        text = str(error).strip().splitlines() or [type(error).__name__]
        return text[0][:120]
    return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + 1
