"""A process of its own for JAX: eight CPU devices, which must be said before JAX starts.

`grug` (a fixture of tests/conftest.py) starts it once per test process; `grug("parity:updates", depth=2)` runs
tests/grug/parity.py's function there and returns what it returned. An error there is raised here, with its traceback.
"""

import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.line_server import ENVIRONMENT, end_with_parent

# These tests spend their time compiling. Without optimizations it takes half as long; without the fusion emitters,
# which lower every fusion through MLIR, half of that. From 0.11 on, XLA has no other way, and ends at a flag unknown.
FLAGS = "--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
if importlib.util.find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
Grug = Callable[..., Any]


def environment(cache: Path, devices: int = 8) -> dict[str, str]:
    """The environment of a process that computes in JAX; what it compiles is kept under `cache`."""
    return ENVIRONMENT | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FLAGS.format(devices=devices),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


@contextmanager
def running(cache: Path) -> Iterator[Grug]:
    """Starts the process; what it compiles is kept under `cache`."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare, (cache,)) as child:
        yield lambda function, **arguments: child.submit(run, function, arguments).result()


def prepare(cache: Path) -> None:
    """Runs in the process before JAX is imported there."""
    end_with_parent()
    os.environ |= environment(cache)
    warnings.simplefilter("error")
    # The exception that pyproject.toml makes for torch, with its reason.
    warnings.filterwarnings("ignore", r".torch\.jit\.script_method. is", DeprecationWarning, r"torch\.jit\._script")


def run(function: str, arguments: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(f"tests.grug.{module}"), name)(**arguments)
