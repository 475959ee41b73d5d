"""A process of its own for JAX: eight CPU devices, which must be said before JAX starts.

`grug` (a fixture of tests/conftest.py) starts it once per test process; `grug("parity:updates", depth=2)` runs
tests/grug/parity.py's function there and returns what it returned, through JSON. An error there fails the test here,
with its traceback.

    python -m tests.support.jax_process      serves requests on stdin
"""

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.line_server import ENVIRONMENT, LineServer

# These tests spend their time compiling. Without optimizations it takes half as long; without the fusion emitters,
# which lower every fusion through MLIR, half of that.
FLAGS = (
    "--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    " --xla_cpu_use_fusion_emitters=false"
)
Grug = Callable[..., Any]


def environment(cache: Path, devices: int = 8) -> dict[str, str]:
    """Of a process that computes in JAX; what it compiles is kept under `cache`."""
    return ENVIRONMENT | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FLAGS.format(devices=devices),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


@contextmanager
def running(folder: Path) -> Iterator[Grug]:
    """Starts the process; its log and what it compiles are in `folder`."""
    with (
        (folder / "log.txt").open("w", encoding="utf-8") as log,
        LineServer(["-m", "tests.support.jax_process"], env=environment(folder / "compiled"), log=log) as server,
    ):

        def call(function: str, **arguments: Any) -> Any:
            answer = server.ask({"function": function, "arguments": arguments}, gone={"error": "the process died"})
            if "error" in answer:
                pytest.fail(f"{answer['error']}\n{(folder / 'log.txt').read_text(encoding='utf-8')[-3000:]}")
            return answer["result"]

        yield call


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed goes to the log
    warnings.simplefilter("error")
    # The exception that pyproject.toml makes for torch, with its reason.
    warnings.filterwarnings("ignore", r".torch\.jit\.script_method. is", DeprecationWarning, r"torch\.jit\._script")
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["function"].partition(":")
        try:
            function = getattr(importlib.import_module(f"tests.grug.{module}"), name)
            answer = {"result": function(**request["arguments"])}
        except (Exception, pytest.fail.Exception):  # reported to the test, which fails with it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
    os._exit(0)  # a clean shutdown would take seconds
