"""`quern lab plan`: the time, memory and cost of training a recipe on some GPUs, before anyone rents them.

docs/parallelism.md says what it prints. Memory (memory.py) and bytes (predict.py) are counted or traced. Time is a
model (predict.py) of tabulated hardware (options.py), not a measurement. GB are 10⁹ bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from quern import machine as machines
from quern.estimate.layout import Layout, lay_out
from quern.estimate.memory import Memory, activations, memory
from quern.estimate.memory_check import machine_memory
from quern.estimate.options import NETWORKS, PROCESSORS, PlanOptions, cpu_rank
from quern.estimate.predict import Cluster, Step, predict
from quern.machine import DTYPES, measure_peak_flops
from quern.model.count import flop_counter, parameters
from quern.process import waiting
from quern.recipe import Resolved
from quern.resolve import resolve
from quern.temporaries import write_whole
from quern.terminal import grid

GB = 1e9


@dataclass(frozen=True)
class Candidate:
    """One layout; an impossible one has a `refusal` and no `step`. recomputed: blocks that run again in the backward
    pass."""

    dp: int
    tp: int
    zero: int = 2
    micro_batch_tokens: int = 0
    recomputed: int = 0
    memory: Memory | None = None
    step: Step | None = None
    refusal: str = ""
    optimizer_memory: str = "device"

    @property
    def seconds(self) -> float:
        return self.step.seconds if self.step else math.inf


def run(options: PlanOptions, log: Callable[[str], None]) -> int:
    """Returns the exit code: 1 when nothing fits."""
    cluster, recipe = cluster_of(options), resolve(options.recipe)
    # One candidate for each number of shards that divides the ranks and fits into a machine.
    sizes = [tp for tp in range(1, min(cluster.per_machine, options.gpus) + 1) if options.gpus % tp == 0]
    with waiting("the memory of each layout to be counted", log=log):
        try:
            candidates = [_candidate(options, cluster, recipe, options.gpus // tp, tp) for tp in sizes]
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise ValueError(f"the model reads values, which a plan does not have: train it ({why})") from error
    found = sorted(candidates, key=lambda one: one.seconds)
    for line in report(options, cluster, found):
        log(line)
    if options.json is not None:
        write_whole(options.json, json.dumps(as_json(options, cluster, found), indent=2) + "\n")
        log(f"record: {options.json}")
    return 0 if found[0].step is not None else 1


def cluster_of(options: PlanOptions) -> Cluster:
    if options.gpu == "cpu":
        machine = machines.detect("cpu", options.dtype, compile=False)
        chip = cpu_rank(measure_peak_flops(machine), machine_memory(), options.gpus)
    else:
        chip = PROCESSORS[options.gpu]
    if options.matmul_tflops is not None:
        rate = options.matmul_tflops * 1e12
        peak = max(chip.peak_flops, rate)
        chip = replace(chip, peak_flops=peak, attained=rate / peak)
    if options.dollars_per_hour is not None:
        chip = replace(chip, dollars_per_hour=options.dollars_per_hour)
    return Cluster(chip, NETWORKS[options.network], options.per_machine or chip.per_machine)


def _candidate(options: PlanOptions, cluster: Cluster, recipe: Resolved, dp: int, tp: int) -> Candidate:
    """Returns the fastest variant of this layout that fits, or the one of the least memory. Parameters that replicas
    share, and masters and moments in the CPU's memory, are tried until no block must run again."""
    device, chip, traced = "cpu" if options.gpu == "cpu" else "cuda", cluster.processor, None
    room, flops = chip.memory - chip.reserved, flop_counter(recipe).per_token()
    asked, tried = recipe.train.optimizer_memory, list[Candidate]()
    for place, zero in product(dict.fromkeys((asked, asked if device == "cpu" else "cpu")), (2, 3) if dp > 1 else (2,)):
        made = replace(recipe, train=replace(recipe.train, optimizer_memory=place))
        try:
            layout = lay_out(made, DTYPES[options.dtype], dp, tp, zero)
        except ValueError as error:
            return Candidate(dp, tp, refusal=str(error))
        traced, fitting = traced or activations(layout, device, options.compile), None
        for again in _settings(layout, fixed=options.recipe.train.micro_batch_tokens is not None):
            train = again.recipe.train
            if train.micro_batch_tokens == fitting:
                continue  # fewer blocks run again fit: more would only take longer
            needed = memory(again, device, options.compile, traced)
            one = Candidate(dp, tp, zero, train.micro_batch_tokens, train.recompute, needed, optimizer_memory=place)
            if needed.peak <= room:
                one, fitting = replace(one, step=predict(again, needed, cluster, flops)), train.micro_batch_tokens
            else:
                one = replace(one, refusal=f"needs {needed.peak / GB:.1f} GB of the {room / GB:.1f} GB that are free")
            tried.append(one)
        if any(one.step and one.recomputed == recipe.train.recompute for one in tried):
            break
    if that_fit := [one for one in tried if one.step]:  # kernels start in no time here: the largest start fewest
        return min(that_fit, key=lambda one: (one.seconds, -one.micro_batch_tokens))
    return min(tried, key=lambda one: one.memory.peak if one.memory else 0)


def _settings(layout: Layout, fixed: bool) -> list[Layout]:
    """Returns the layout with micro-batches of 1, 2, 4, … and all rows of a replica, or the recipe's (`fixed`); each
    with none of its blocks run again in the backward pass, a quarter … all, or the recipe's."""
    asked, depth = layout.recipe.train, len(layout.whole.blocks)
    context, rows = layout.recipe.model.context, layout.rows
    powers = [2**power for power in range(rows.bit_length()) if 2**power < rows]
    sizes = [asked.micro_batch_tokens] if fixed else [count * context for count in (*powers, rows)]
    counts = [asked.recompute] if asked.recompute else sorted({-(-depth * quarter // 4) for quarter in range(5)})
    found = [replace(asked, micro_batch_tokens=size, recompute=count) for size, count in product(sizes, counts)]
    return [replace(layout, recipe=replace(layout.recipe, train=train)) for train in found]


# Output -----------------------------------------------------------------------------------------------------


def report(options: PlanOptions, cluster: Cluster, found: list[Candidate]) -> list[str]:
    """Returns lines for a terminal. found: the candidates, the best first."""
    recipe, chip = resolve(options.recipe), cluster.processor
    train = recipe.train
    count = parameters(recipe)
    machines_needed = -(-options.gpus // cluster.per_machine)
    between = f" in {machines_needed:,} machines, {options.network} between them" if machines_needed > 1 else ""
    lines = [
        f"{recipe.name}, depth {recipe.depth}: {count.total / 1e6:,.1f}M parameters, "
        f"{flop_counter(recipe).per_token() / 1e9:.4g} GFLOP a token",
        f"horizon: {train.steps:,} steps of {train.batch_tokens:,} tokens, {train.steps * train.batch_tokens:,} in all",
        f"on {options.gpus:,} × {options.gpu}{between}, {chip.memory / GB:.0f} GB each; "
        f"matrix products at {chip.peak_flops * chip.attained / 1e12:,.4g} TFLOP/s in {options.dtype}",
        "",
    ]
    lines += grid(HEAD, [_row(one, options, cluster, train.steps) for one in found])
    best, one_of = found[0], "one GPU" if options.gpu != "cpu" else "one rank"
    if best.step is None or best.memory is None:
        ways = [f"more GPUs (--gpus {2 * options.gpus})"] * (options.gpu != "cpu") + ["a smaller --depth"]
        if (options.recipe.train.micro_batch_tokens or 0) > recipe.model.context:  # otherwise the smallest was tried
            ways.append(f"--train.micro-batch-tokens {recipe.model.context}")
        remedy = f"use {', or '.join(ways)}"
        if all(one.memory is None for one in found):  # none was cut so far that its memory could be counted
            remedy = "use fewer --gpus, or a larger --train.batch-tokens"
        return [*lines, "", "why", *_refusals(found), "", f"Nothing fits: {remedy}"]
    flags = f"--tp {best.tp} --train.micro-batch-tokens {best.micro_batch_tokens}"
    flags += f" --train.recompute {best.recomputed}" if best.recomputed else ""
    flags += " --zero 3" if best.zero == 3 else ""
    flags += " --train.optimizer-memory cpu" if best.optimizer_memory == "cpu" else ""
    lines += ["", f"best: dp {best.dp:,} × tp {best.tp}: {flags}", ""]
    lines += [f"memory of {one_of}{'' if options.gpu != 'cpu' else ' (the interpreter comes on top)'}"]
    lines += [f"  {name:22} {size / GB:9.3f} GB  {note}" for name, size, note in _categories(best.memory)]
    lines += ["", f"{one_of} sends per step"]
    lines += [f"  {kind:22} {size / GB:9.3f} GB" for kind, size in best.step.traffic.items()] or ["  nothing"]
    refusals = _refusals(found)
    return [*lines, *(["", "what does not fit", *refusals] if refusals else []), "", *ASSUMED]


HEAD = ("dp", "tp", "zero", "micro-batch", "again", "memory GB", "products", "pointwise", "update", "model", "data",
        "step ms", "tokens/s", "MFU %", "days", "dollars")  # fmt: skip
ASSUMED = (
    "zero: 3 where replicas must share parameters and gradients, or it is faster than running blocks again. again: the",
    "first so many blocks run again in the backward pass (--train.recompute), in quarters.",
    "The columns from products to data are ms of a step. model: collectives of tensor parallelism; data: collectives",
    "of data parallelism that nothing hides. Memory and bytes are counted. Times are a model without kernel launches,",
    "stragglers and waiting for data: trust a measured run more (docs/parallelism.md).",
)


def _row(one: Candidate, options: PlanOptions, cluster: Cluster, steps: int) -> tuple[str, ...]:
    needed = f"{one.memory.peak / GB:.2f}" if one.memory else "-"
    micro = f"{one.micro_batch_tokens:,}" if one.micro_batch_tokens else "-"
    head = (f"{one.dp:,}", str(one.tp), str(one.zero), micro, str(one.recomputed), needed)
    if one.step is None:
        return (*head, *["-"] * (len(HEAD) - len(head)))
    step = one.step
    parts = (step.products, step.pointwise, step.update, step.model, step.data, step.seconds)
    speed, mfu, days, dollars = totals(one, options, cluster, steps).values()
    shown_days = f"{days:,.2f}" if days >= 0.1 else f"{days:.4f}"
    cost = "-" if dollars is None else f"{dollars:,.0f}"
    return (*head, *(f"{1e3 * part:,.2f}" for part in parts), f"{speed:,.0f}", f"{100 * mfu:.1f}", shown_days, cost)


def totals(one: Candidate, options: PlanOptions, cluster: Cluster, steps: int) -> dict[str, Any]:
    """Returns the figures that follow from the step's time; days and dollars of the whole run."""
    assert one.step is not None
    chip, batch_tokens = cluster.processor, resolve(options.recipe).train.batch_tokens
    days = steps * one.step.seconds / 86_400
    price = chip.dollars_per_hour
    return {
        "tokens_per_second": batch_tokens / one.step.seconds,
        "mfu": one.step.flops / one.step.seconds / (chip.peak_flops * options.gpus),
        "days": days,
        "dollars": None if price is None else days * 24 * price * options.gpus,
    }


def _categories(one: Memory) -> list[tuple[str, int, str]]:
    return [
        ("parameters", one.parameters, ""),
        ("gradients", one.gradients, ""),
        ("fp32 masters", one.masters, "" if one.masters else "parameters are their own"),
        ("moments", one.moments, ""),
        ("in the CPU's memory", one.away, "masters and moments, beside the peak" if one.away else ""),
        ("activations", one.activations, "of one micro-batch"),
        ("run again", one.again, "activations of one block, when the loss is gone"),
        ("gathered", one.whole, "parameters of two modules" if one.whole else ""),
        ("sent", one.sent, "gradients of two modules, when the loss is gone" if one.sent else ""),
        ("loss", one.loss, "a chunk of logits, gradients of head and hidden states"),
        ("gradients in flight", one.in_flight, "" if one.accumulates else "when activations are gone"),
        ("update", one.update, "when activations are gone"),
        ("peak", one.peak, ""),
    ]


def _refusals(found: Sequence[Candidate]) -> list[str]:
    return [f"  dp {one.dp:,} × tp {one.tp}: {one.refusal}" for one in found if one.step is None]


def as_json(options: PlanOptions, cluster: Cluster, found: list[Candidate]) -> dict[str, Any]:
    """Returns everything that the report shows, and its inputs, in bytes and seconds."""
    recipe = resolve(options.recipe)
    body = []
    for one in found:
        entry = asdict(one)
        if one.memory:
            entry["memory"]["peak"] = one.memory.peak
        if one.step:
            entry["step"]["seconds"] = one.step.seconds
            entry |= totals(one, options, cluster, recipe.train.steps)
        body.append(entry)
    return {
        "recipe": recipe.to_json(),
        "gpus": options.gpus,
        "gpu": options.gpu,
        "network": options.network,
        "cluster": asdict(cluster),
        "parameters": vars(parameters(recipe)),
        "flops_per_token": flop_counter(recipe).per_token(),
        "candidates": body,
    }
