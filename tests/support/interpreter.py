"""Runs Triton kernels on the CPU, in Triton's interpreter, in a process of their own.

Triton reads TRITON_INTERPRET when it is first imported and when a kernel is decorated. So the variable lives only in a
child process, and the functions that launch kernels run there, by the fixture `interpreted` of tests/conftest.py:

    def test_the_kernel(interpreted: Interpreted) -> None:
        assert interpreted(worst_deviation, (1, 17)) <= 1e-5      # a function at the top level of a module

The function, its arguments and its result travel by pickle. What the function raises is raised here; a warning is an
error there too.

Use fp32: the interpreter's product of bf16 matrices gives wrong numbers.
Triton 3.6 holds scalars as arrays of one element, which NumPy 2.4 no longer turns into the integers that a loop's
bounds must be; the child repairs that.
"""

import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.line_server import end_with_parent

Interpreted = Callable[..., Any]
"""Calls a function, its first argument, in the child with the others and returns its result."""


def prepare() -> None:
    """Runs in the child before anything is imported there."""
    end_with_parent()
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    _let_scalars_bound_loops()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.jit\._script")  # as pyproject.toml


def _let_scalars_bound_loops() -> None:
    from triton.runtime import interpreter

    patch_as_shipped = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_as_shipped(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


@contextmanager
def running() -> Iterator[Interpreted]:
    """A child that interprets; skips where Triton isn't installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it has builds for Linux only")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare) as child:
        yield lambda function, *arguments: child.submit(function, *arguments).result()
