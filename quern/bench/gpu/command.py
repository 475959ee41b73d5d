"""`quern bench gpu`: what only a GPU shows, on one, in nine minutes. Also `python -m quern.bench.gpu.command`.

Sections, each with its share of the time; one that fails is recorded with its error, one that runs out of time with
what it has, and the rest go on. The record, <out>/bench/gpu.json, and its table, gpu.md, are written anew after each
section, so that a run that is cut short leaves what it measured. Neither the command line's nor the tokenizer trainer's
package is needed. Without a GPU it says so; --quick runs every section at tiny sizes on whatever there is.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quern.bench.gpu.attention import exactness, speed
from quern.bench.gpu.decode import decoding
from quern.bench.gpu.kernels import cross_entropy, muon, rope
from quern.bench.gpu.real import real
from quern.bench.gpu.setup import Bench, Limits, OutOfTime, first_line, measure_limits
from quern.bench.gpu.table import page, shown
from quern.bench.gpu.train import training_bf16, training_fp8
from quern.bench.record import Measure, load_average, versions, write
from quern.bounds import refuse_outside
from quern.kernels.attention.autotune import select_attention
from quern.machine import Machine, detect

MINUTES = 9.0


@dataclass(frozen=True)
class Section:
    """measure: yields figures as they are taken; seconds: what it may take when all sections run."""

    measure: Callable[[Bench], Iterator[Measure]]
    seconds: float


SECTIONS = {
    "training": Section(training_bf16, 120),
    "attention": Section(speed, 120),
    "exactness": Section(exactness, 80),
    "decode": Section(decoding, 70),
    "loss": Section(cross_entropy, 40),
    "rope": Section(rope, 25),
    "muon": Section(muon, 25),
    "fp8": Section(training_fp8, 80),
    "real": Section(real, 90),
}
"""In order of weight: what the first take over their share is taken from the last."""


def main(arguments: Sequence[str], log: Callable[[str], None]) -> int:
    """Runs the sections asked for; returns the exit code: 1 where there is no GPU."""
    options = parse(arguments)
    if not torch.cuda.is_available() and not options.quick:
        log("there is no GPU here that torch can use: run this where there is one, or see it run with --quick")
        return 1
    began = time.monotonic()
    machine = select_attention(detect(None, None, options.compile, options.threads))
    body = record(machine, options, time.monotonic() - began)
    for line in introduction(body):
        log(line)
    limits = measure_limits(machine, options.quick)
    body["limits"] = vars(limits)
    log(f"limits: {limits.flops / 1e12:,.1f} TFLOP/s, {limits.bytes_per_second / 1e9:,.0f} GB/s")
    for name in options.sections:
        left = began + 60 * options.minutes - time.monotonic()
        if left > 0:
            share = SECTIONS[name].seconds if len(options.sections) > 1 else left
            log(f"\n{name}")
            body["sections"][name] = run(name, bench_for(machine, options, limits, min(share, left)), log)
        else:
            body["sections"][name] = {"error": "left out: no time", "measures": [], "problems": [], "seconds": 0.0}
        body["seconds"] = round(time.monotonic() - began, 2)
        save(body, options.out / "bench")
    log(f"\nrecord: {options.out / 'bench' / 'gpu.json'}, table: {options.out / 'bench' / 'gpu.md'}")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("quern bench gpu", description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="only these")
    add("--minutes", type=float, default=MINUTES, help="when to stop")
    add("--data", help="text to train on: a file or folder; or prepared tokens (.bin)")
    add("--tokenizer", help="the tokenizer of prepared tokens")
    add("--out", type=Path, default=Path("out"), help="the record goes to bench/ in here")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="CPU threads; default: one for each core")
    add("--quick", action="store_true", help="tiny sizes, to see that everything runs; the figures mean nothing")
    add("--no-compile", dest="compile", action="store_false", help="run eagerly")
    options = parser.parse_args(list(arguments))
    for name in ("minutes", "seed", "threads"):
        if getattr(options, name) is not None:
            refuse_outside(name, getattr(options, name), f"--{name}")
    return options


def bench_for(machine: Machine, options: argparse.Namespace, limits: Limits, seconds: float) -> Bench:
    deadline = time.monotonic() + seconds
    return Bench(machine, options.quick, options.seed, options.data, options.tokenizer, limits, deadline)


def run(name: str, bench: Bench, log: Callable[[str], None]) -> dict[str, Any]:
    """One section's part of the record."""
    start, measures, error, trace = time.monotonic(), [], None, None
    torch.manual_seed(bench.seed)
    try:
        for measure in SECTIONS[name].measure(bench):
            measures.append(measure)
            log(f"  {measure.name}: {shown(measure.median)} {measure.unit}  {measure.note}".rstrip())
    except OutOfTime:
        error = "out of time: what follows was left out"
    except Exception as raised:  # whatever a kernel's author, a driver or the compiler thought of: the others go on
        error, trace = first_line(raised), traceback.format_exc()[-4000:]
    for line in [*bench.problems, *([error] if error else [])]:
        log(f"  ! {line}")
    clean_up()
    return {
        "seconds": round(time.monotonic() - start, 2),
        "error": error,
        "traceback": trace,
        "problems": list(bench.problems),
        "measures": [measure.to_json() for measure in measures],
    }


def clean_up() -> None:
    """Gives back a section's memory and forgets what it compiled, so that no section depends on another."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def record(machine: Machine, options: argparse.Namespace, choosing: float) -> dict[str, Any]:
    """The record's head; sections are added as they are done."""
    return {
        "what": "gpu",
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.describe(),
        "notes": list(machine.notes),
        "seconds_to_choose_attention": round(choosing, 2),
        "versions": versions(),
        "seed": options.seed,
        "quick": options.quick,
        "load_average_before": load_average(),
        "limits": {},
        "seconds": 0.0,
        "sections": {},
    }


def introduction(body: dict[str, Any]) -> Iterator[str]:
    machine = body["machine"]
    yield f"{machine['processor']}, {machine['dtype']}, {'compiled' if machine['compiled'] else 'eager'}"
    yield f"attention: {machine['attention']} (chosen in {body['seconds_to_choose_attention']:.0f} s)"
    yield from body["notes"]


def save(body: dict[str, Any], folder: Path) -> None:
    write(folder / "gpu.json", body)
    temporary = folder / "gpu.tmp"
    temporary.write_text(page(body), encoding="utf-8")
    temporary.replace(folder / "gpu.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], lambda line: print(line, flush=True)))
