"""`quern bench gpu`: nine minutes of measurements that need a GPU.

Each section has its share of the time. A section that fails is recorded with its error, one that runs out of time with
its figures so far, and the others run. The record, <out>/bench/gpu.json, and its page, gpu.md, are written after each
section, so an interrupted run keeps its figures. Without a GPU the program says so; --quick runs every section at tiny
sizes on any machine.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from quern.bench.gpu.kernels import OVER_FULL, cross_entropy, decoding, exactness, muon, place, rope, speed
from quern.bench.gpu.train import GpuBench, measure_limits, real, training_bf16, training_fp8
from quern.bench.measure import Figure, OutOfTime, first_line, head, number, table, write
from quern.bench.options import GpuOptions, Section
from quern.kernels.attention.autotune import select_attention
from quern.temporaries import write_whole

SECTIONS: dict[Section, tuple[Callable[[GpuBench], Iterator[Figure]], float]] = {
    "training": (training_bf16, 120),
    "attention": (speed, 120),
    "exactness": (exactness, 80),
    "decode": (decoding, 70),
    "loss": (cross_entropy, 40),
    "rope": (rope, 25),
    "muon": (muon, 25),
    "fp8": (training_fp8, 80),
    "real": (real, 90),
}
"""The function of each section, and its seconds when all sections run. A late section may get less."""
UNMEASURED = "not yet measured"
FULL, WINDOW = (place(128, 16_384, mask, "triton") for mask in ("full", "window 1024"))
AIMS = (  # description, section, figure, unit, least or most, limit
    ("causal attention, 16,384 tokens, head dim 128, forward", "attention", f"{FULL} forward", "TFLOP/s", "≥", 400),
    ("the same, backward", "attention", f"{FULL} backward", "TFLOP/s", "≥", 330),
    ("a window of 1,024 over full, the same sizes, forward", "attention", f"{WINDOW} forward{OVER_FULL}", "×", "≥", 4),
    ("the same, backward", "attention", f"{WINDOW} backward{OVER_FULL}", "×", "≥", 4),
    ("training at depth 12: MFU", "training", "MFU: of the data sheet", "%", "≥", 45),
    ("training at depth 12: memory", "training", "memory: at most", "GB", "≤", 34),
    ("decoding at batch 1", "decode", "batch 1, compiled: of the bandwidth", "%", "≥", 50),
)


def run(options: GpuOptions, log: Callable[[str], None], command: str = "") -> int:
    """Runs the named sections and returns the exit code: 1 without a GPU. command: the command line."""
    if not torch.cuda.is_available() and not options.quick:
        log("there is no GPU here that torch can use: run this on a machine with one, or try it with --quick")
        return 1
    began, load, folder = time.monotonic(), os.getloadavg()[0], options.out / "bench"
    folder.mkdir(parents=True, exist_ok=True)  # before minutes of measurements
    machine = select_attention(options.detect())
    chosen = round(time.monotonic() - began, 2)
    limits = measure_limits(machine, options.quick)
    rounds = 2 if options.quick else 5
    bench = GpuBench(machine, options.seed, options.quick, rounds, command=command, limits=limits, options=options)
    body = head("gpu", bench) | {"load_average_before": load, "notes": list(machine.notes)}
    body |= {"seconds_to_choose_attention": chosen, "limits": vars(limits), "seconds": 0.0, "sections": {}}
    found = body["machine"]
    log(f"{found['processor']}, {found['dtype']}, {'compiled' if machine.compile else 'eager'}")
    for line in (f"attention: {found['attention']} (chosen in {chosen:.0f} s)", *machine.notes):
        log(line)
    log(f"limits: {limits.flops / 1e12:,.1f} TFLOP/s, {limits.bytes_per_second / 1e9:,.0f} GB/s")
    for name in options.sections:
        deadline = began + 60 * options.minutes
        if len(options.sections) > 1:
            deadline = min(deadline, time.monotonic() + SECTIONS[name][1])
        log(f"\n{name}")
        body["sections"][name] = measured(name, replace(bench, deadline=deadline, problems=[], log=log))
        body["seconds"] = round(time.monotonic() - began, 2)
        write(folder / "gpu.json", body)
        write_whole(folder / "gpu.md", page(body))
    log(f"\nrecord: {folder / 'gpu.json'}, table: {folder / 'gpu.md'}")
    return 0


def measured(name: Section, bench: GpuBench) -> dict[str, Any]:
    """Runs a section and returns its part of the record."""
    start, measures, error, trace = time.monotonic(), [], None, None
    torch.manual_seed(bench.seed)
    try:
        bench.check_time()
        for one in SECTIONS[name][0](bench):
            measures.append(one)
            bench.log(f"  {one['name']}: {number(one['median'])} {one['unit']}  {one.get('note', '')}".rstrip())
    except OutOfTime:
        error = "out of time: the rest of the section was left out"
    except Exception as raised:  # kernels, drivers and the compiler raise errors of any type: run the other sections
        error, trace = first_line(raised), traceback.format_exc()[-4000:]
    for line in [*bench.problems, *([error] if error else [])]:
        bench.log(f"  ! {line}")
    # No section may depend on the memory or the compiled code of another.
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = round(time.monotonic() - start, 2)
    return {"seconds": seconds, "error": error, "traceback": trace, "problems": bench.problems, "measures": measures}


def page(body: Mapping[str, Any]) -> str:
    """Returns the page of a record, or of {} for none."""
    lines = ["# GPU measurements", ""]
    if body:
        machine, version = body["machine"], body["versions"]
        lines += [
            f"{machine['processor']}, {machine['dtype']}, torch {version['torch']}, quern {version['quern']} "
            f"({version['git']}), {body['utc']}, {body['seconds']:.0f} s. Attention: {machine['attention']}.",
            "",
            *(["Tiny sizes (--quick): the figures mean nothing.", ""] if body["quick"] else []),
            *(f"- {note}" for note in body["notes"]),
        ]
    else:
        lines += ["`quern bench gpu` has not been run on a GPU yet; it writes such a page to `out/bench/gpu.md`.", ""]
    sections = body.get("sections", {})
    found = {(name, m["name"]): m["median"] for name, section in sections.items() for m in section["measures"]}
    lines += ["| aim | limit | measured | |", "|---|---|---|---|"]
    for what, section, name, unit, sign, limit in AIMS:
        value = found.get((section, name))
        result = f"{UNMEASURED} | " if value is None else f"{number(value)} {unit} | {verdict(value, sign, limit)}"
        lines.append(f"| {what} | {sign} {limit:g} {unit} | {result} |")
    for name, section in sections.items():
        problems = [f"- {line}" for line in (*section["problems"], section["error"]) if line]
        lines += ["", f"## {name}", "", "```", *table(section["measures"]), "```", *problems]
    return "\n".join(lines) + "\n"


def verdict(value: float, sign: str, limit: float) -> str:
    return "met" if (value >= limit if sign == "≥" else value <= limit) else "missed"
