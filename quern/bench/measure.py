"""Measurement for all benchmarks: their context (`Setup`), seconds of jobs in rounds, peak memory, figures, records.

Timings on a shared machine are noisy. Compared jobs therefore alternate, a figure has a value for each round, and a
ratio is a ratio of two arrays of rounds. A short call is timed by `triton.testing.do_bench` on CUDA and by
`torch.utils.benchmark.Timer` elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer

import quern
from quern.bench.material import SIZES, Sizes
from quern.bench.options import BenchOptions
from quern.machine import Machine, peak_memory, reset_peak_memory
from quern.process import resident
from quern.records import git_hash
from quern.stages.prepare import first
from quern.text.documents import read
from quern.text.sources import files
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer

PACKAGES = ("numpy", "tiktoken", "rustbpe")  # torch tells itself which build it is, its package does not
WARM_UP_MS, MEASURED_MS = 5, 20
Job = Callable[[], object]
Seconds = dict[str, np.ndarray]  # seconds of a call by the name of its job, a value for each round
Figure = dict[str, Any]  # name, unit, median, low, high, values (one for each round), and a note where there is one


@dataclass(kw_only=True)
class Setup(BenchOptions):
    """Context of a benchmark: its options, and what follows from them; the text is made at first use."""

    machine: Machine
    settings: dict[str, Any] = field(default_factory=dict)  # the sizes used, for the record; the benchmark fills it in
    log: Callable[[str], None] = print  # takes lines for the user
    command: str = ""  # the command line, for the records of runs

    @property
    def on_gpu(self) -> bool:
        return self.machine.device.type == "cuda"

    @property
    def sizes(self) -> Sizes:
        return SIZES["quick" if self.quick else "cuda" if self.on_gpu else "cpu"]

    @cached_property
    def texts(self) -> list[str]:
        """Documents of `--megabytes` in all, or all documents of a smaller source."""
        megabytes, data = 0.2 if self.quick else self.megabytes, self.data
        found = list(corpus.documents(self.seed, megabytes) if data is None else first(read(files(data)), megabytes))
        if not any(found):
            raise ValueError(f"--data {data} has no text: give a file or a folder of text")
        return found

    @cached_property
    def text_bytes(self) -> int:
        return sum(len(text.encode("utf-8", "replace")) for text in self.texts)

    @property
    def text_name(self) -> str:
        return "tinyworld" if self.data is None else self.data.name

    @property
    def vocab_size(self) -> int:
        return 512 if self.quick else 8192

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.train(self.texts, self.vocab_size)

    def failed(self, name: str, error: BaseException) -> None:
        """Says and records that a job failed, in the handler of its error; the other jobs go on."""
        self.settings.setdefault("failures", {})[name] = traceback.format_exc()[-4000:]
        first = str(error).strip().partition("\n")[0][:200]
        self.log(f"  ! {name}: {f'{type(error).__name__}: {first}'.removesuffix(': ')}")

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Returns standard normal numbers on the device, in the compute dtype by default."""
        numbers = torch.Generator(device=self.machine.device).manual_seed(self.seed + seed)
        x = torch.randn(shape, generator=numbers, device=self.machine.device)
        return x.to(dtype or self.machine.dtype)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=False) if self.machine.compile else function

    def once(self, jobs: Mapping[str, Job]) -> Seconds:
        """Returns the seconds of each job, called once in each round: for jobs that take long."""
        return alternate(self.rounds, {name: partial(seconds_of, job) for name, job in jobs.items()})

    def working(self, jobs: Mapping[str, Job]) -> dict[str, Job]:
        """Returns the jobs that can be called; the others are said and recorded."""
        found: dict[str, Job] = {}
        for name, job in jobs.items():
            try:
                job()
                self.machine.synchronize()
                found[name] = job
            except Exception as error:  # kernels, drivers and the compiler raise errors of any type
                self.failed(name, error)
        return found

    def seconds(self, jobs: Mapping[str, Job]) -> Seconds:
        """Returns the seconds of a call of each job that works, after calls that are not counted."""
        working = self.working(jobs)
        timed = {name: partial(call_seconds, job, self.machine, self.quick) for name, job in working.items()}
        return alternate(self.rounds, timed)

    def passes(self, forwards: Mapping[str, Callable[[], Tensor]], inputs: Sequence[Tensor], grad: Tensor) -> Seconds:
        """Returns the seconds of "<name> forward" and "<name> backward", the time of both passes less the forward, of
        what works."""
        both = self.working({name: lambda f=f: torch.autograd.grad(f(), inputs, grad) for name, f in forwards.items()})
        taken = self.seconds({**{f"{name} forward": forwards[name] for name in both}, **both})
        found: Seconds = {}
        for name in both:
            found[f"{name} forward"] = first = taken[f"{name} forward"]
            found[f"{name} backward"] = np.maximum(taken[name] - first, 1e-9)
        return found


def alternate(rounds: int, jobs: Mapping[str, Callable[[], float]]) -> Seconds:
    """Runs each job once per round, after a round that is not counted, and returns the values by job. Every other round
    runs in reverse order."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name in list(jobs)[:: 1 if turn % 2 == 0 else -1]:
            value = jobs[name]()
            if turn:
                taken[name].append(value)
    return {name: np.array(values) for name, values in taken.items()}


def seconds_of(job: Job) -> float:
    """Returns the wall-clock seconds of one call, with the work of the accelerator included."""
    start = timer()  # waits for the accelerator
    job()
    return timer() - start


def call_seconds(job: Job, machine: Machine, quick: bool = False) -> float:
    """Returns the median seconds of a call over `MEASURED_MS`; one block of calls suffices for `quick`."""
    if machine.device.type != "cuda":
        timed = Timer("job()", globals={"job": job}, num_threads=machine.threads)
        return timed.blocked_autorange(min_run_time=1e-6 if quick else MEASURED_MS / 1e3).median
    from triton.testing import do_bench

    milliseconds: Any = do_bench(job, warmup=WARM_UP_MS, rep=MEASURED_MS, return_mode="median")
    return milliseconds / 1e3


def peak_bytes(job: Job, machine: Machine) -> int | None:
    """Returns the most memory that a call held beyond what was held before it, or None if the system does not say."""
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = torch.cuda.memory_allocated() if machine.device.type == "cuda" else resident()
    if before is None or not reset_peak_memory(machine.device):
        return None
    job()
    return peak_memory(machine.device) - before


# Figures and records -------------------------------------------------------------------------------------------------


def figure(name: str, unit: str, values: Any, note: str = "") -> Figure:
    """Returns a figure. values: an array, a sequence or a single number."""
    listed = np.atleast_1d(np.asarray(values, dtype=float)).tolist()
    body = {"name": name, "unit": unit, "median": statistics.median(listed), "low": min(listed), "high": max(listed)}
    return body | {"values": listed} | ({"note": note} if note else {})


def number(value: float) -> str:
    """Formats a value with three or more digits, or one below 0.01 with an exponent."""
    if 0 < abs(value) < 0.01:
        return f"{value:.1e}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def line_of(one: Figure) -> str:
    """Returns the line of a figure: name, median, unit, spread, note."""
    spread = f"{number(one['low'])} .. {number(one['high'])}"
    line = f"  {one['name']:48}  {number(one['median']):>7} {one['unit']:8}  {spread:>18}  {one.get('note', '')}"
    return line.rstrip()


def versions() -> dict[str, str]:
    """Returns the versions of quern, its source, Python and the measured packages that are installed."""
    found = {"torch": torch.__version__} | {name: version(name) for name in PACKAGES if find_spec(name)}
    git = git_hash(Path(__file__).parent) or "unknown"
    return {"quern": quern.__version__, "python": platform.python_version(), **found, "git": git}


def head(what: str, setup: Setup) -> dict[str, Any]:
    """Returns the fields that all records begin with."""
    return {
        "what": what,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": setup.machine.describe(),
        "notes": list(setup.machine.notes),
        "versions": versions(),
        "seed": setup.seed,
        "quick": setup.quick,
        "load_average_before": os.getloadavg()[0],
    }
