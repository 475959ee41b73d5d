"""`quern bench`: how fast each part of quern is on this machine, and how good a model some minutes of training make.

Each benchmark prints its figures with their spread and writes a record to <out>/bench/<what>.json. The docstring of its
file says how each figure is measured. `quern bench gpu` is a program with flags of its own: gpu/command.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from quern.bench.attention import attention, windows
from quern.bench.cross_entropy import cross_entropy
from quern.bench.data import encode, loading, packing, tokenizer
from quern.bench.generate import decode, prefill
from quern.bench.material import MICRO_BATCH_TOKENS, Material
from quern.bench.quality import quality
from quern.bench.ranks import ranks
from quern.bench.record import Outcome, Setup, load_average, record, table, versions, write
from quern.bench.train import train
from quern.flags import check_flags
from quern.flags.check_flags import UNSAID
from quern.kernels.attention.autotune import select_attention
from quern.machine import detect

What = Literal["tokenizer", "encode", "packing", "loading", "train", "prefill", "decode", "attention", "windows",
               "cross-entropy", "ranks", "grug", "quality"]  # fmt: skip

QUICK = tokenizer, encode, packing, loading, train, prefill, decode, attention, windows, cross_entropy
BENCHMARKS: dict[str, Callable[[Setup], Outcome]] = {run.__name__.replace("_", "-"): run for run in QUICK}
"""The benchmarks that run when no name is given."""


@dataclass(frozen=True)
class BenchOptions:
    """Measure this machine: each figure is the median of several rounds, with the lowest and the highest.

    example: quern bench train decode

    example: quern bench quality --train train.parquet --val val.parquet --minutes 10

    example: quern bench gpu --help
    """

    what: Annotated[tuple[What, ...], tyro.conf.Positional] = ()
    """What to measure. Default: all except ranks, grug and quality."""
    out: Path = Path("out")
    """The folder of the records, which are written to bench/ in it."""
    rounds: int = 5
    """How often each figure is measured."""
    seed: int = 0
    batch_tokens: int = MICRO_BATCH_TOKENS
    """`train`, `ranks`, `grug`: tokens of one optimizer step, in micro-batches of at most 4,096."""
    start: bool = True
    """`train`: also measure start-up time and peak memory of new processes, which takes longest."""
    data: Annotated[Path | None, UNSAID] = None
    """Text for tokenizer, encode and packing: a file or a folder. Default: the built-in world."""
    megabytes: float = 8.0
    """How much of that text to use."""
    train: Annotated[Path | None, UNSAID] = None
    """`quality`: the training text, a file or a folder. It has no default."""
    val: Annotated[Path | None, UNSAID] = None
    """`quality`: the validation text. It has no default."""
    minutes: float = 10.0
    """`quality`: minutes of training, counted in steps only."""
    depth: int = 4
    """`quality`: the depth of the recipe."""
    quick: bool = False
    """Use tiny sizes, to see that everything runs; the figures mean nothing."""
    device: Annotated[Literal["cpu", "cuda", "mps"] | None, UNSAID] = None
    """Default: the fastest device of the machine."""
    dtype: Annotated[Literal["bf16", "fp32"] | None, UNSAID] = None
    """Default: bf16 where it is measured to be faster."""
    threads: Annotated[int | None, UNSAID] = None
    """CPU threads. Default: one for each core."""
    compile: bool = True
    """--no-compile runs eagerly."""


def main(arguments: list[str], log: Callable[[str], None]) -> int:
    """Runs the named benchmarks and returns the exit code. Raises ValueError for a wrong name or flag."""
    options = check_flags.read(BenchOptions, arguments, prog="quern bench")
    validate(options)
    machine = select_attention(detect(options.device, options.dtype, options.compile, options.threads))
    megabytes, vocab_size = (0.2, 512) if options.quick else (options.megabytes, 8192)
    material = Material(options.seed, megabytes, vocab_size, options.data)
    sizes = options.rounds, options.quick, options.batch_tokens, options.start
    setup = Setup(machine, options.seed, *sizes, material, log)
    for line in (*machine.notes, *introduction(setup)):
        log(line)
    for what in dict.fromkeys(options.what or BENCHMARKS):
        load, start = load_average(), time.monotonic()
        # Each benchmark starts with the same random numbers and threads, whichever ran before it.
        torch.manual_seed(setup.seed)
        torch.set_num_threads(machine.threads)
        outcome = measure(what, options, setup)
        body = record(what, outcome, setup, time.monotonic() - start, load)
        path = options.out / "bench" / f"{what}.json"
        write(path, body)
        for line in (*render(what, outcome, body["seconds"], load), f"  record: {path}"):
            log(line)
    return 0


def validate(options: BenchOptions) -> None:
    """Raises ValueError or FileNotFoundError, before anything is measured, with the value to give instead."""
    if options.batch_tokens % 512:
        raise ValueError(f"--batch-tokens must be a multiple of the 512 tokens of a row, not {options.batch_tokens}")
    if "quality" in options.what and (options.train is None or options.val is None):
        raise ValueError("quality needs text: give --train and --val, each a file or a folder")
    for path in (options.data, options.train, options.val):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"there is no {path}: give a file or a folder of text")


def introduction(setup: Setup) -> Iterator[str]:
    """Yields the lines that name machine, versions and settings."""
    found, compiled = setup.machine.describe(), "compiled" if setup.machine.compile else "eager"
    yield f"machine   {found['processor']}"
    yield f"          {found['device']}, {found['dtype']}, {found['threads']} threads, {compiled}, {found['system']}"
    yield f"versions  {', '.join(f'{name} {text}' for name, text in versions().items())}"
    yield f"figures   median of {setup.rounds} rounds (lowest .. highest), seed {setup.seed}"
    if setup.quick:
        yield "          --quick: tiny sizes, the figures mean nothing"


def measure(what: str, options: BenchOptions, setup: Setup) -> Outcome:
    if what == "ranks":
        return ranks(setup)
    if what == "grug":  # needs packages that no other benchmark needs
        from quern.bench.jax import grug

        return grug(setup)
    if what != "quality":
        return BENCHMARKS[what](setup)
    assert options.train and options.val
    return quality(
        setup.machine,
        options.out,
        train=options.train,
        val=options.val,
        minutes=options.minutes,
        depth=options.depth,
        seed=options.seed,
        log=setup.log,
    )


def render(what: str, outcome: Outcome, seconds: float, load: float | None) -> Iterator[str]:
    """Yields the lines of one benchmark: title, settings, figures."""
    busy = f", load average before {load:.1f}" if load is not None else ""
    yield f"\n{what}  ({seconds:.0f} s{busy})"
    simple = {name: value for name, value in outcome.settings.items() if not isinstance(value, dict)}
    if simple:
        shown = ((name, f"{value:,}" if isinstance(value, int) else value) for name, value in simple.items())
        yield "  " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown)
    yield from outcome.lines or table(outcome.measures)
