"""Sections of `quern bench gpu` about the other kernels: rotary positions, the loss, Muon's iteration.

Each is compared with its plain twin, for exactness and speed; the plain twin is compiled, as it would be used. GB/s
count the bytes that have to be moved: each input read once, each output written once. The loss is measured whole
(TFLOP/s of its three products, and the memory that it needs on top of its inputs) and for the kernel over the logits
alone. Muon's iteration has the sizes of a model of depth 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.bench.gpu.setup import Bench, Timed, peak_bytes, timed
from quern.bench.record import Measure, ratios
from quern.kernels import cross_entropy as loss
from quern.kernels.rope import rotate, rotate_normed, rotate_normed_plain, rotate_plain
from quern.kernels.softcap import SigmoidCap, TanhCap
from quern.kernels.symmetric import symmetric_product, symmetric_product_plain
from quern.kernels.triton_found import triton_found
from quern.model.layers import rotary_table
from quern.optim.constants import POLAR_EXPRESS
from quern.optim.muon import polar_express

Turn = Callable[[Tensor], Tensor]


def compiled(bench: Bench, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False) if bench.machine.compile else function


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found.float() - exact.float()).norm() / exact.float().norm().clamp(min=1e-30)).item()


# Rotary positions ---------------------------------------------------------------------------------------------


def rope(bench: Bench) -> Iterator[Measure]:
    """GB/s and exactness of the rotation, alone and with the norm of queries and keys."""
    B, T, H, E = (2, 16, 2, 8) if bench.quick else (32, 2048, 6, 128)
    x = bench.random(B, T, H, E).requires_grad_()
    grad = bench.random(B, T, H, E, seed=1)
    cos, sin = rotary_table(torch.arange(T, device=x.device)[None], E, 1e5)
    kinds: dict[str, tuple[Turn, Turn, int]] = {  # ours, the plain twin, tensors moved backward
        "rotation": (lambda x: rotate(x, cos, sin), lambda x: rotate_plain(x, cos, sin), 2),
        "norm and rotation": (
            lambda x: rotate_normed(x, cos, sin, 1.2),
            lambda x: rotate_normed_plain(x, cos, sin, 1.2),
            3,
        ),
    }
    for name, (ours, plain, tensors_back) in kinds.items():
        yield from _turn_exactness(name, ours, plain, x, grad)
        jobs: dict[str, Timed] = {}
        for label, turn in (("ours", ours), ("plain, compiled", compiled(bench, plain))):
            back = Timed(lambda y: torch.autograd.grad(y, x, grad), before=lambda turn=turn: turn(x))
            if bench.works(f"{name}: {label}", back):
                jobs |= {f"{label} forward": timed(lambda turn=turn: turn(x)), f"{label} backward": back}
        for job, seconds in bench.rounds(jobs).items():
            moved = x.numel() * x.element_size() * (2 if job.endswith("forward") else tensors_back)
            yield Measure(f"{name}: {job}", "GB/s", tuple(moved / one / 1e9 for one in seconds))


def _turn_exactness(name: str, ours: Turn, plain: Turn, x: Tensor, grad: Tensor) -> Iterator[Measure]:
    """Against the plain twin in fp32; the error of the plain twin in x's dtype is beside it."""
    wide = x.detach().float().requires_grad_()
    exact = plain(wide)
    (exact_dx,) = torch.autograd.grad(exact, wide, grad.float())
    for label, turn in (("ours", ours), ("plain", plain)):
        y = turn(x)
        (dx,) = torch.autograd.grad(y, x, grad)
        worst = max(relative_error(y, exact), relative_error(dx, exact_dx))
        yield Measure(f"{name}: error, {label}", "relative", (worst,))


# The loss -----------------------------------------------------------------------------------------------------


def cross_entropy(bench: Bench) -> Iterator[Measure]:
    """Time, TFLOP/s, memory and exactness of the loss of 65,536 tokens over a vocabulary of 32,768."""
    N, D, V = (64, 16, 128) if bench.quick else (65_536, 768, 32_768)
    x, weight = bench.random(N, D).requires_grad_(), (bench.random(V, D, seed=1) * D**-0.5).detach().requires_grad_()
    numbers = torch.Generator().manual_seed(bench.seed)
    targets = torch.randint(V, (N,), generator=numbers).to(x.device)
    scale = torch.full((N,), 1 / N, device=x.device)
    for cap in (TanhCap(15.0), SigmoidCap(30.0, 7.5 * D**0.5)):
        yield _loss_exactness(cap, x, weight, targets, scale)
    cap = TanhCap(15.0)

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        return (F.cross_entropy(cap((x @ weight.T).float()), targets, reduction="none") * scale).sum()

    whole = compiled(bench, whole)
    ways: dict[str, Callable[[], object]] = {
        "in chunks": lambda: loss.cross_entropy(x, weight, targets, scale, cap)[0].backward(),
        "full logits, compiled": lambda: whole(x, weight).backward(),
    }
    jobs = {name: timed(way) for name, way in ways.items() if bench.works(f"loss {name}", timed(way))}
    for name, seconds in bench.rounds(jobs, rounds=3).items():
        yield Measure(f"loss, {name}: time", "ms", tuple(1e3 * one for one in seconds))
        yield Measure(f"loss, {name}: products", "TFLOP/s", tuple(6 * N * D * V / one / 1e12 for one in seconds))
        held = peak_bytes(bench.machine, ways[name])
        if held is not None:
            yield Measure(f"loss, {name}: memory", "GB", (held / 1e9,))
    x.grad = weight.grad = None
    yield from _logit_kernels(bench, cap, N, V)


def _loss_exactness(cap: TanhCap | SigmoidCap, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Measure:
    """Of the losses and both gradients, over the first tokens, against the definition in fp32."""
    part = slice(0, min(2048, len(x)))
    few = x.detach()[part].requires_grad_(), weight.detach().requires_grad_()
    total, losses = loss.cross_entropy(*few, targets[part], scale[part], cap)
    found = [losses, *torch.autograd.grad(total, few)]
    wide = [one.detach().float().requires_grad_() for one in few]
    exact_losses = loss.cross_entropy_plain(wide[0], wide[1], targets[part], cap)
    exact = [exact_losses.detach(), *torch.autograd.grad((exact_losses * scale[part]).sum(), wide)]
    worst = max(relative_error(a, b) for a, b in zip(found, exact, strict=True))
    return Measure(f"loss, {cap}: error", "relative", (worst,))


def _logit_kernels(bench: Bench, cap: TanhCap, N: int, V: int) -> Iterator[Measure]:
    """What turns a chunk's logits into gradients, alone: it reads and writes them once."""
    kernels = {"compiled": loss.COMPILED}
    if bench.machine.device.type == "cuda" and triton_found():
        kernels["triton"] = loss.TRITON
    for name, path in kernels.items():
        chunk = path.chunks(N, V)[0]
        logits = bench.random(chunk.stop - chunk.start, V)
        job = _logit_job(path, logits, cap)
        place = f"kernel over {len(logits):,} tokens' logits: {name}"
        if bench.works(place, job):
            moved = 2 * logits.numel() * logits.element_size()
            yield Measure(place, "GB/s", tuple(moved / one / 1e9 for one in bench.rounds({name: job})[name]))


def _logit_job(path: loss.ChunkPath, logits: Tensor, cap: TanhCap) -> Timed:
    targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    scale = torch.ones(len(logits), device=logits.device)
    return Timed(lambda x: path.gradient(x, targets, scale, cap), before=logits.clone)  # it may overwrite them


# Muon ---------------------------------------------------------------------------------------------------------


def muon(bench: Bench) -> Iterator[Measure]:
    """The iteration over the matrices of 12 layers, with plain products and with symmetric ones."""
    width, layers = (32, 2) if bench.quick else (768, 12)
    stacks = {
        "attention's": bench.random(4 * layers, width, width),
        "feed-forward's": bench.random(2 * layers, width, 4 * width, seed=1),
    }
    ways = {
        "plain": compiled(bench, _with(symmetric_product_plain)),
        "symmetric": compiled(bench, _with(symmetric_product)),
    }
    for name, stack in stacks.items():
        expected = polar_express(stack)
        jobs = {}
        for label, iterate in ways.items():
            job = timed(lambda iterate=iterate, stack=stack: iterate(stack))
            if bench.works(f"{name} matrices: {label}", job):
                jobs[label] = job
                error = relative_error(iterate(stack), expected)
                yield Measure(f"{name} matrices: error, {label}", "relative", (error,), "against optim/muon.py")
        taken = bench.rounds(jobs)
        for label, seconds in taken.items():
            yield Measure(f"{name} matrices: {label}", "ms", tuple(1e3 * one for one in seconds))
        if len(taken) == 2:
            yield Measure(f"{name} matrices: plain / symmetric", "×", ratios(taken["plain"], taken["symmetric"]))


def _with(product: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Muon's iteration on stacks that are no taller than wide, with this as X Xᵀ and as the square of that."""

    def iterate(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
        x = (x / (norm * 1.02 + 1e-30)).to(x.dtype)
        for a, b, c in POLAR_EXPRESS[:5]:
            gram = product(x)
            polynomial = product(gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        return x

    return iterate
