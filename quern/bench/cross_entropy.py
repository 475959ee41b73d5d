"""Benchmark of the loss: head, softcap and cross-entropy with their gradients, in chunks and from all logits at once.

Memory is the most that one call holds beyond what was held before it, after the compiler has run; each path runs in its
own process (`python -m quern.bench.cross_entropy`). On a CPU that is resident memory, which only Linux reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quern.bench.measure import Bench, Figure, Job, figure, peak_bytes
from quern.child import serve, start
from quern.kernels import cross_entropy as kernels
from quern.kernels.softcap import Cap, TanhCap
from quern.machine import detect, machine_flags

if TYPE_CHECKING:
    from quern.bench.options import Setup  # with packages that `quern bench gpu` does without

CAP = TanhCap(15.0)


def cross_entropy(setup: Setup) -> Iterator[Figure]:
    machine, sizes = setup.machine, (512, 32, 4096) if setup.quick else (4096, 256, 32768)
    setup.settings.update(zip(("tokens", "width", "vocabulary"), sizes, strict=True), softcap=str(CAP))
    whole = ["full", *(["full, compiled"] if machine.compile else [])]
    names = ["chunked", *whole]
    jobs = loss_jobs(setup, *sizes)
    taken = setup.seconds({name: jobs[name] for name in names})
    yield from (figure(f"{name}: time", "ms", 1e3 * taken[name]) for name in names)
    yield from (figure(f"{name} / chunked: time", "×", taken[name] / taken["chunked"]) for name in whole)
    order = {"sizes": sizes, "seed": setup.seed, "machine": machine_flags(machine)}
    held: dict[str, Any] = {}
    for name in names:
        with start("quern.bench.cross_entropy", name, order | {"name": name}) as process:
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
