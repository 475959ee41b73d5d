"""`quern bench`: how fast each part of quern is on this machine, and how good a model some minutes of training make.

Each benchmark prints its figures with their spread and writes a record to <out>/bench/<what>.json. docs/benchmarks/
README.md says how each figure is measured. `quern bench gpu` is gpu/command.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from quern.bench.data import Setup, encode, loading, packing, prepare, tokenizer
from quern.bench.generate import decode, prefill
from quern.bench.kernels import attention, cross_entropy, windows
from quern.bench.measure import Figure, head, table, versions, write
from quern.bench.options import BenchOptions
from quern.bench.quality import quality
from quern.bench.train import ranks, train
from quern.kernels.attention.autotune import select_attention
from quern.process import waiting
from quern.terminal import counted
from quern.validate import extra


def grug(setup: Setup) -> Iterator[Figure]:
    with extra("jax", "this benchmark needs extra packages"):
        from quern.bench.jax import grug

    return grug(setup)


def serve(setup: Setup) -> Iterator[Figure]:
    with extra("serve", "this benchmark needs extra packages"):
        from quern.bench.serve import serve

    return serve(setup)


QUICK = tokenizer, encode, packing, loading, train, prefill, decode, attention, windows, cross_entropy
"""The benchmarks that run when no name is given."""
BENCHMARKS: dict[str, Callable[[Setup], Iterator[Figure]]] = {
    run.__name__.replace("_", "-"): run for run in (*QUICK, prepare, ranks, grug, serve, quality)
}


def run(options: BenchOptions, log: Callable[[str], None], command: str = "") -> int:
    """Runs the named benchmarks and returns the exit code. command: the command line. Raises OSError if there can be
    no folder for the records."""
    (folder := options.out / "bench").mkdir(parents=True, exist_ok=True)
    machine = select_attention(options.detect())
    setup = Setup(machine, options.seed, options.quick, options.rounds, log=log, command=command, options=options)
    for line in (*machine.notes, *introduction(setup)):
        log(line)
    for what in dict.fromkeys(options.what or list(BENCHMARKS)[: len(QUICK)]):
        body, start = head(what, setup), time.monotonic()
        # Each benchmark starts with the same random numbers and threads, whichever ran before it.
        torch.manual_seed(setup.seed)
        torch.set_num_threads(machine.threads)
        setup.settings.clear()
        with waiting(f"the figures of {what}, which are printed together", log=log):
            measures = list(BENCHMARKS[what](setup))
        seconds = round(time.monotonic() - start, 2)
        body |= {"rounds": setup.rounds, "seconds": seconds, "settings": setup.settings}
        path = folder / f"{what}.json"
        write(path, body | {"measures": measures})
        log(f"\n{what}  ({seconds:.0f} s, load average before {body['load_average_before']:.1f})")
        sizes = {name.replace("_", " "): v for name, v in setup.settings.items() if not isinstance(v, dict)}
        if sizes:
            log("  " + ", ".join(f"{name} {f'{v:,}' if isinstance(v, int) else v}" for name, v in sizes.items()))
        for line in (*table(measures), f"  record: {path}"):
            log(line)
    return 0


def introduction(setup: Setup) -> Iterator[str]:
    """Yields the lines that name machine, versions and settings."""
    found, compiled = setup.machine.describe(), "compiled" if setup.machine.compile else "eager"
    yield f"machine   {found['processor']}"
    threads = counted(setup.machine.threads, "thread")
    yield f"          {found['device']}, {found['dtype']}, {threads}, {compiled}, {found['system']}"
    yield f"versions  {', '.join(f'{name} {text}' for name, text in versions().items())}"
    yield f"figures   median of {setup.rounds} rounds (lowest .. highest), seed {setup.seed}"
    if setup.quick:
        yield "          --quick: tiny sizes, the figures mean nothing"
