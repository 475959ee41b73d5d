"""Sections of `quern bench gpu` about the other kernels: rotary positions, the loss, Muon's iteration.

Each kernel is compared with its plain definition, for exactness (in fp32) and for speed (compiled, as a model would use
it). GB/s count each input read once and each output written once. The loss is measured whole (TFLOP/s of its three
products, and its memory on top of its inputs), and for the kernel over the logits alone. Muon's iteration has the sizes
of a model of depth 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from quern.bench.gpu.setup import GpuBench, worst_error
from quern.bench.kernels import CAP, loss_inputs, loss_jobs, loss_paths
from quern.bench.measure import Figure, figure, peak_bytes
from quern.kernels import cross_entropy as kernels
from quern.kernels.rope import rotate, rotate_normed, rotate_normed_plain, rotate_plain
from quern.kernels.softcap import SigmoidCap
from quern.kernels.symmetric import symmetric_product, symmetric_product_plain
from quern.kernels.triton_found import TRITON_FOUND
from quern.model.layers import rotary_table
from quern.optim.constants import POLAR_EXPRESS
from quern.optim.muon import polar_express


def rope(bench: GpuBench) -> Iterator[Figure]:
    """GB/s and error of the rotation, alone and with the norm of queries and keys."""
    B, T, H, E = (2, 16, 2, 8) if bench.quick else (32, 2048, 6, 128)
    x, grad = bench.random(B, T, H, E).requires_grad_(), bench.random(B, T, H, E, seed=1)
    cos, sin = rotary_table(torch.arange(T, device=x.device)[None], E, 1e5)
    turned, normed = {"cos": cos, "sin": sin}, {"cos": cos, "sin": sin, "gain": 1.2}
    kinds = {  # the kernel, the plain definition, tensors moved backward
        "rotation": (partial(rotate, **turned), partial(rotate_plain, **turned), 2),
        "norm and rotation": (partial(rotate_normed, **normed), partial(rotate_normed_plain, **normed), 3),
    }
    for name, (ours, plain, tensors_back) in kinds.items():
        for label, turn in (("ours", ours), ("plain", plain)):
            yield figure(f"{name}: error, {label}", "relative", worst_error(turn, plain, [x], grad))
        turns = {"ours": ours, "plain, compiled": bench.compiled(plain)}
        forwards = {f"{name}: {label}": partial(turn, x) for label, turn in turns.items()}
        for job, seconds in bench.passes(forwards, [x], grad).items():
            tensors = 2 if job.endswith("forward") else tensors_back
            yield figure(job, "GB/s", tensors * x.nbytes / 1e9 / seconds)


def cross_entropy(bench: GpuBench) -> Iterator[Figure]:
    """Time, TFLOP/s, memory and error of the loss of 65,536 tokens over a vocabulary of 32,768."""
    N, D, V = (64, 16, 128) if bench.quick else (65_536, 768, 32_768)
    (x, weight), paths = loss_inputs(bench, N, D, V), loss_paths(bench, N, V)
    for cap in (CAP, SigmoidCap(30.0, 7.5 * D**0.5)):
        chunked, full = (partial(path, cap=cap) for path in paths)
        error = worst_error(chunked, full, [x[:2048], weight], torch.ones((), device=x.device))
        yield figure(f"loss, {cap}: error", "relative", error)
    jobs = loss_jobs(bench, N, D, V)
    ways = {"loss, in chunks": jobs["chunked"], "loss, full logits, compiled": jobs["full, compiled"]}
    for name, seconds in bench.seconds(ways).items():
        yield figure(f"{name}: time", "ms", 1e3 * seconds)
        yield figure(f"{name}: products", "TFLOP/s", 6 * N * D * V / 1e12 / seconds)
        if bench.on_gpu:
            yield figure(f"{name}: memory", "GB", (peak_bytes(ways[name], bench.machine) or 0) / 1e9)
    for name, path in {"compiled": kernels.COMPILED, "triton": kernels.TRITON}.items():
        if name == "compiled" or (bench.on_gpu and TRITON_FOUND):
            rows = min(N, path.chunks(N, V)[0].stop)
            logits = bench.random(rows, V)
            targets = torch.randint(V, (rows,), device=x.device)
            job = partial(path.gradient, logits, targets, torch.full((rows,), 1 / N, device=x.device), CAP)
            for place, seconds in bench.seconds({f"kernel over {rows:,} tokens' logits: {name}": job}).items():
                yield figure(place, "GB/s", 2 * logits.nbytes / 1e9 / seconds)


def muon(bench: GpuBench) -> Iterator[Figure]:
    """Time and error of the iteration over the matrices of 12 layers, with plain products and with symmetric ones."""
    width, layers = (32, 2) if bench.quick else (768, 12)
    products = {"plain": symmetric_product_plain, "symmetric": symmetric_product}
    for name, count, factor in (("attention's", 4, 1), ("feed-forward's", 2, 4)):
        place, stack = f"{name} matrices", bench.random(count * layers, width, factor * width)
        ways = {f"{place}: {label}": bench.compiled(partial(iterate, product=p)) for label, p in products.items()}
        taken = bench.seconds({job: partial(way, stack) for job, way in ways.items()})
        expected = polar_express(stack).float()
        for job, seconds in taken.items():
            error = (ways[job](stack).float() - expected).norm() / expected.norm()
            yield figure(job.replace(": ", ": error, "), "relative", error.item(), "against optim/muon.py")
            yield figure(job, "ms", 1e3 * seconds)
        if len(taken) == len(ways):
            plain, symmetric = taken.values()
            yield figure(f"{place}: plain / symmetric", "×", plain / symmetric)


def iterate(x: Tensor, product: Callable[..., Tensor]) -> Tensor:
    """Muon's iteration on stacks with no more rows than columns; `product` computes X Xᵀ and the square of that."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (x / (norm * 1.02 + 1e-30)).to(x.dtype)
    for a, b, c in POLAR_EXPRESS[:5]:
        gram = product(x)
        x = torch.baddbmm(x, product(gram, gram, beta=b, alpha=c), x, beta=a)
    return x
