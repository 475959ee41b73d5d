"""A training process of its own, for what only a fresh process can show: start-up time and peak memory.

`python -m quern.bench.start '{…}'` detects the machine, builds the reference model and trains a few
steps. It prints a JSON line after the first step and another at the end; the parent (`first_step`) holds
the clock, which runs from before the interpreter starts. "cold" compiles everything, the compiler's own header
included, as on a machine that has never compiled; "warm" finds the compiler's cache on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quern
from quern.machine import Machine, detect, environment

STEPS = 4


@dataclass(frozen=True)
class Started:
    """first_step_seconds: from the start of the process to the end of its first step, compilation included;
    peak_memory_bytes: the most that the process held (its device, on CUDA), None where the system does not
    say."""

    first_step_seconds: float
    peak_memory_bytes: int | None


def first_step(machine: Machine, seed: int, quick: bool, batch_tokens: int, cache: str) -> Started:
    """Starts the process and waits for it. cache: a folder for the compiler, empty for a cold start.

    Raises RuntimeError with the process's last words when it fails.
    """
    order = {
        "device": machine.device.type,
        "dtype": {"bfloat16": "bf16", "float32": "fp32"}[str(machine.dtype).removeprefix("torch.")],
        "compile": machine.compile,
        "threads": machine.threads,
        "seed": seed,
        "quick": quick,
        "batch_tokens": batch_tokens,
    }
    # The child finds this very quern, installed or not.
    paths = [str(Path(quern.__file__).parent.parent), environment().get("PYTHONPATH", "")]
    variables = {
        **environment(),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TMPDIR": cache,  # where the compiler keeps its precompiled header, whatever its cache's folder
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "quern.bench.start", json.dumps(order)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
            encoding="utf-8",
        ) as process:
            assert process.stdout
            first = process.stdout.readline()
            seconds = time.perf_counter() - start
            last = process.stdout.read()
        if process.returncode or not first:
            errors.seek(0)
            said = errors.read().strip().splitlines()[-5:]
            raise RuntimeError("the training process of the benchmark failed: " + " | ".join(said))
    return Started(seconds, json.loads(last)["peak_memory_bytes"])


def train(order: dict[str, Any]) -> None:
    """What the process does."""
    import torch

    from quern.bench.material import random_batch, reference
    from quern.kernels.attention.autotune import select_attention
    from quern.optim.schedule import Multipliers
    from quern.train.state import build_model, build_state, compile_model
    from quern.train.step import train_step

    machine = select_attention(detect(order["device"], order["dtype"], order["compile"], order["threads"]))
    recipe = reference(order["quick"], order["seed"], order["batch_tokens"])
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed))
    compile_model(state.model, machine)
    for step in range(STEPS):
        batch = random_batch(recipe, step)
        train_step(state, batch, Multipliers(), machine, micro_batch_rows=recipe.micro_batch_rows)
        machine.synchronize()
        if step == 0:
            print(json.dumps({"step": 1}), flush=True)
    on_cuda = machine.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_cuda else peak_resident_bytes()
    print(json.dumps({"peak_memory_bytes": peak}), flush=True)


def peak_resident_bytes() -> int | None:
    """The most physical memory this process has held.

    On Linux from /proc: getrusage's figure there is never below what the parent held when it started the
    process.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        if sys.platform == "darwin":
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
