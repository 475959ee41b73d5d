"""`quern bench`: how fast each part of quern is on this machine, and how good a model some minutes of training make.

Each benchmark prints its figures with their spread and writes a record to <out>/bench/<what>.json, with --quick
<what>.quick.json. docs/benchmarks/README.md says how each figure is measured.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator

import torch

from quern.bench.data import encode, loading, packing, prepare, tokenizer
from quern.bench.generate import decode, prefill
from quern.bench.kernels import attention, cross_entropy, exactness, muon, rope, windows
from quern.bench.measure import Figure, Setup, head, line_of, versions
from quern.bench.options import BenchOptions
from quern.bench.quality import quality
from quern.bench.train import fp8, ranks, train
from quern.kernels.attention.autotune import select_attention
from quern.process import waiting
from quern.temporaries import write_whole
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
GPU = "train", "attention", "exactness", "decode", "cross-entropy", "rope", "muon", "fp8"
"""The benchmarks of the name "gpu". If one fails, its record has its errors and figures so far; the next one runs."""
BENCHMARKS: dict[str, Callable[[Setup], Iterator[Figure]]] = {
    run.__name__.replace("_", "-"): run
    for run in (*QUICK, prepare, ranks, grug, serve, quality, exactness, rope, muon, fp8)
}


def run(options: BenchOptions, log: Callable[[str], None], command: str = "") -> int:
    """Runs the named benchmarks and returns the exit code, 1 if something of `GPU` failed. command: the
    command line. Raises OSError if there can be no folder for the records."""
    (options.out / "bench").mkdir(parents=True, exist_ok=True)
    machine, failed = select_attention(options.detect()), False
    setup = Setup(machine=machine, log=log, command=command, **vars(options))
    for line in (*machine.notes, *introduction(setup)):
        log(line)
    named = options.what or list(BENCHMARKS)[: len(QUICK)]
    for what in dict.fromkeys(one for name in named for one in (GPU if name == "gpu" else [name])):
        setup.settings.clear()
        measure(what, setup)
        failed = failed or "failures" in setup.settings
    return int(failed)


def measure(what: str, setup: Setup) -> None:
    """Runs a benchmark, prints its figures and writes its record. The figures so far are kept beside an earlier record,
    which they replace at the end: a benchmark that fails or is stopped leaves both."""
    body, start, log = head(what, setup), time.monotonic(), setup.log
    measures: list[Figure] = []
    failure, path = None, setup.out / "bench" / f"{what}{'.quick' if setup.quick else ''}.json"
    part = path.with_suffix(".part.json")

    def keep() -> None:
        seconds = round(time.monotonic() - start, 2)
        body.update(rounds=setup.rounds, seconds=seconds, settings=setup.settings, measures=measures)
        write_whole(part, json.dumps(body, indent=2, ensure_ascii=False) + "\n")

    log(f"\n{what}  (load average before {body['load_average_before']:.1f})")
    try:
        # Each benchmark starts with the same random numbers and threads, whichever ran before it; on a GPU without the
        # memory and the compiled code of another.
        torch.manual_seed(setup.seed)
        torch.set_num_threads(setup.machine.threads)
        if setup.on_gpu:
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        with waiting(f"the figures of {what}", log=log):
            for one in BENCHMARKS[what](setup):
                measures.append(one)
                keep()
                log(line_of(one))
    except (Exception, KeyboardInterrupt) as error:  # also the end of a time limit, which keeps the figures so far
        if what not in GPU:
            raise
        setup.failed(what, error)
        failure = error
    keep()
    whole = failure is None and bool(measures)
    if whole:
        part.replace(path)
    sizes = {name.replace("_", " "): v for name, v in setup.settings.items() if not isinstance(v, dict)}
    if sizes:
        log("  " + ", ".join(f"{name} {f'{v:,}' if isinstance(v, int) else v}" for name, v in sizes.items()))
    ended = "" if measures else ", no figure"
    if failure is not None:
        ended = f", ended by {type(failure).__name__}"
    log(f"  after {body['seconds']:.0f} s{ended}, record: {path if whole else part}")
    if isinstance(failure, KeyboardInterrupt):
        raise failure


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
