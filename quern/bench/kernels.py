"""Benchmarks of kernels: attention by path, length and mask, training with windows, and the loss.

A path's changes of layout are included, and calls are eager. The loss is head, softcap and cross-entropy with their
gradients; the child, `python -m quern.bench.kernels`, measures the memory of one of its paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quern.bench.data import Setup
from quern.bench.material import reference, sizes_of
from quern.bench.measure import Bench, Figure, Job, Seconds, alternate, figure, peak_bytes
from quern.bench.train import take_step, training_state
from quern.kernels import cross_entropy as kernels
from quern.kernels.attention.attend import MaskSpec
from quern.kernels.attention.autotune import BLOCKED, PLAIN, SDPA, Backend, Picked, available, fits, problem_with
from quern.kernels.softcap import Cap, TanhCap
from quern.machine import Machine, detect, machine_flags
from quern.process import serve, start
from quern.recipe import Resolved

TOKENS, HEADS, HEAD_DIM = 4096, 4, 64
LENGTHS = (256, 512, 1024, 2048)
CONTEXT = 2048
CAP = TanhCap(15.0)


def attention(setup: Setup) -> Iterator[Figure]:
    tokens, lengths = (128, (32, 64)) if setup.quick else (TOKENS, LENGTHS)
    picked = setup.machine.attention
    setup.settings.update(tokens=tokens, heads=HEADS, head_dim=HEAD_DIM, picked=str(picked))
    on_cpu = setup.machine.device.type == "cpu"
    paths = [BLOCKED, SDPA, PLAIN] if on_cpu else [*available(setup.machine), BLOCKED, PLAIN]
    served = [
        (kind, path)
        for kind, path in product(("full", "window", "documents"), paths)  # a path that skips none builds dense masks
        if (fits(path, kind) or not path.skips) and (on_cpu or problem_with(path, kind, setup.machine) is None)
    ]
    for T in lengths:
        masks = example_masks(setup, tokens // T, T, T // 4, 4 / T)
        cases = {
            f"T={T}, {name}: {path.name}": (mask, path)
            for (name, mask), path in product(masks.items(), paths)
            if (name.split()[0], path) in served
        }
        taken = attention_seconds(setup, cases, (tokens // T, T, HEADS, HEAD_DIM))
        yield from (figure(name, "ms", 1e3 * seconds) for name, seconds in taken.items())
        both = {name: taken[f"{name} forward"] + taken[f"{name} backward"] for name in cases}
        chosen = {
            name: (picked.path(mask, T) if isinstance(picked, Picked) else BLOCKED).name for name, mask in masks.items()
        }
        own = {name: both[f"T={T}, {name}: {path}"] for name, path in chosen.items()}
        for name, path in chosen.items():
            if name != "full":
                yield figure(f"T={T}: full / {name}, as picked", "×", own["full"] / own[name])
            if path != SDPA.name and (stock := both.get(f"T={T}, {name}: {SDPA.name}")) is not None:
                yield figure(f"T={T}, {name}: sdpa / {path}", "×", stock / own[name])


def example_masks(bench: Bench, rows: int, T: int, window: int, starts: float) -> dict[str, MaskSpec]:
    """Returns masks by name: full, a window, documents of random lengths. starts: documents that begin in a token."""
    begins_BT = torch.rand(rows, T, generator=bench.machine.generator(bench.seed)) < starts
    documents_BT = begins_BT.cumsum(1).int().to(bench.machine.device)
    return {"full": MaskSpec(), f"window {window}": MaskSpec(window), "documents": MaskSpec(None, documents_BT)}


Cases = dict[str, tuple[MaskSpec, Backend]]
"""A mask and the path that computes it, by the name of the figure without its pass."""


def attention_seconds(bench: Bench, cases: Cases, shape: tuple[int, int, int, int]) -> Seconds:
    """Times all cases, which alternate, by "<name> forward" and "<name> backward". shape: (B, T, H, E)."""
    q, k, v, grad = (bench.random(*shape, seed=i) for i in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    forwards = {name: partial(path.attend, q, k, v, mask, None) for name, (mask, path) in cases.items()}
    return bench.passes(forwards, inputs, grad)


def windows(setup: Setup) -> Iterator[Figure]:
    """Tokens/s of training, and the gain of windows over the two other ways."""
    recipe, machine = reference(setup.quick, setup.seed), setup.machine
    recipe = replace(recipe, model=replace(recipe.model, context=64 if setup.quick else CONTEXT))
    setup.settings.update(sizes_of(recipe), windows="SSSL, L", attention=str(machine.attention))
    stock = replace(machine, attention=SDPA)
    ways = {"SSSL": ("SSSL", machine), "all long": ("L", machine), "all long by torch's SDPA": ("L", stock)}
    taken = alternate(setup.rounds, {name: _steps(recipe, *way) for name, way in ways.items()})
    for name in ways:
        yield figure(f"training, {name}", "tokens/s", recipe.train.batch_tokens / taken[name])
    windowed, *others = ways
    for name in others:
        yield figure(f"{windowed} / {name}", "×", taken[name] / taken[windowed])


def _steps(recipe: Resolved, windows: str, machine: Machine) -> Callable[[], float]:
    """Returns a function that trains a new model for two steps and returns the seconds of the faster one."""
    recipe = replace(recipe, model=replace(recipe.model, windows=windows))
    state = training_state(recipe, machine)
    return lambda: min(take_step(state, recipe, machine)[0] for _ in range(2))


def cross_entropy(setup: Setup) -> Iterator[Figure]:
    machine, sizes = setup.machine, (512, 32, 4096) if setup.quick else (4096, 256, 32768)
    setup.settings.update(zip(("tokens", "width", "vocabulary"), sizes, strict=True), softcap=str(CAP))
    whole = ["full", *(["full, compiled"] if machine.compile else [])]
    names = ["chunked", *whole]
    jobs = loss_jobs(setup, *sizes)
    taken = setup.seconds({name: jobs[name] for name in names})
    yield from (figure(f"{name}: time", "ms", 1e3 * taken[name]) for name in names)
    yield from (figure(f"{name} / chunked: time", "×", taken[name] / taken["chunked"]) for name in whole)
    # In processes of their own: memory that an earlier call has freed, and the allocator keeps, would count.
    order = {"sizes": sizes, "seed": setup.seed, "machine": machine_flags(machine)}
    held: dict[str, Any] = {}
    for name in names:
        with start("quern.bench.kernels", name, order | {"name": name}) as process:
            held[name] = process.answer()["bytes"]
    if None in held.values():
        setup.log("memory is left out: this system does not report what a single call takes")
        return
    yield from (figure(f"{name}: memory", "MB", held[name] / 1e6) for name in names)
    yield from (figure(f"{name} / chunked: memory", "×", held[name] / held["chunked"]) for name in whole)


def loss_paths(bench: Bench, N: int, V: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns the chunked and the plain mean loss as functions of (x, weight, cap); x holds the first of N tokens."""
    targets_N = torch.randint(V, (N,), generator=bench.machine.generator(bench.seed)).to(bench.machine.device)
    scale_N = torch.full((N,), 1 / N, device=bench.machine.device)

    def chunked(x: Tensor, weight: Tensor, cap: Cap = CAP) -> Tensor:
        return kernels.cross_entropy(x, weight, targets_N[: len(x)], scale_N[: len(x)], cap)[0]

    def full(x: Tensor, weight: Tensor, cap: Cap = CAP) -> Tensor:
        return (kernels.cross_entropy_plain(x, weight, targets_N[: len(x)], cap) * scale_N[: len(x)]).sum()

    return chunked, full


def loss_inputs(bench: Bench, N: int, D: int, V: int) -> tuple[Tensor, Tensor]:
    """Returns random hidden states and a random head, which require gradients."""
    return bench.random(N, D).requires_grad_(), bench.random(V, D, seed=1).mul_(D**-0.5).requires_grad_()


def loss_jobs(bench: Bench, N: int, D: int, V: int) -> dict[str, Job]:
    """Returns functions that compute the loss with its gradients, by path."""
    inputs, (chunked, full) = loss_inputs(bench, N, D, V), loss_paths(bench, N, V)
    losses = {"chunked": chunked, "full": full, "full, compiled": bench.compiled(full)}

    def once(loss: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(loss(*inputs), inputs)

    return {name: partial(once, loss) for name, loss in losses.items()}


def answers(order: dict[str, Any], _: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Runs in its own process: answers with the memory of one call."""
    machine = detect(**order["machine"])
    job = loss_jobs(Bench(machine, order["seed"]), *order["sizes"])[order["name"]]
    job()  # compiles
    yield {"bytes": peak_bytes(job, machine)}


if __name__ == "__main__":
    serve(answers)
