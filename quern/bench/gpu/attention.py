"""Sections of `quern bench gpu` about attention: the error of each path, and its speed.

Exactness: each path that skips what masks hide, and the definition computed in the dtype, against the definition in
fp32. The figure is the worst error of the output and the gradients over lengths, windows, documents and groups.

Speed: TFLOP/s over the pairs of query and key that see each other: 4 · pairs · heads · head dim forward, 2.5 times that
backward (FlashAttention-2, arXiv 2307.08691). 16,384 tokens a call in rows of 1,024 to 16,384; 2,048 / head dim heads.
Paths that compile for each shape (flex_attention): only 16,384 and 4,096 tokens with a head dim of 128.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from quern.bench.gpu.setup import Bench, first_line, worst_error
from quern.bench.record import Measure, rates, ratios
from quern.kernels.attention.attend import MaskSpec, attend_plain, visible
from quern.kernels.attention.autotune import available, fits, kind_of
from quern.kernels.attention.backends import BLOCKED, SDPA, AttendFunction, Backend

TOKENS, WIDTH, WINDOW = 16_384, 2048, 1024
SHAPES = [(128, T) for T in (16_384, 4096, 1024, 2048, 8192)] + [(64, T) for T in (16_384, 4096, 1024)]
BY_SHAPE = ((128, 16_384), (128, 4096))
EXACTNESS = (("bfloat16", 128), ("bfloat16", 64), ("float16", 128), ("bfloat16", 256), ("bfloat16", 32))
FLOPS = {"forward": 1.0, "backward": 2.5}
OVER_FULL = ", over full"


def paths(bench: Bench) -> list[Backend]:
    return available(bench.machine) if bench.on_gpu else [BLOCKED, SDPA]


def exactness(bench: Bench) -> Iterator[Measure]:
    """The worst error over the grid, by path, dtype and head dim."""
    rounded = Backend("definition", attend_rounded, windows=True, documents=True, growing=True)
    kinds = (("float32", 16),) if bench.quick else EXACTNESS
    for (dtype, E), path in itertools.product(kinds, [*paths(bench), rounded]):
        if not path.windows or path.by_shape:
            continue
        place, worst = f"{path.name}, {dtype}, head dim {E}: error", (0.0, "")
        try:
            for T, groups, mask in grid(bench):
                bench.check_time()
                if fits(path, kind_of(mask, T)):
                    shapes = enumerate((4, 4 // groups, 4 // groups, 4))
                    *inputs, grad = (bench.random(2, T, H, E, dtype=getattr(torch, dtype), seed=i) for i, H in shapes)
                    prepared = path.prepare(mask, T, bench.machine.device)
                    ours, plain = bound(path.attend, prepared), bound(attend_plain, mask)
                    case = f"{T} tokens, groups of {groups}, window {mask.window}"
                    case += "" if mask.documents_BT is None else ", documents"
                    worst = max(worst, (worst_error(ours, plain, inputs, grad), case))
        except (RuntimeError, ValueError) as error:
            bench.problems.append(f"{place}: {first_line(error)}")
        else:
            yield Measure(place, "relative", worst[:1], worst[1])


def bound(attend: AttendFunction, mask: MaskSpec) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(q, k, v, mask, None)


def grid(bench: Bench) -> Iterator[tuple[int, int, MaskSpec]]:
    """Yields length, groups and mask of each case."""
    lengths = (1, 17, 65) if bench.quick else (1, 17, 127, 129, 1000, 2049)
    for T, window, groups in itertools.product(lengths, (None, 1, 64, 66, 5000), (1, 2, 4)):
        yield T, groups, MaskSpec(window)
    for T, window, each in itertools.product(lengths, (None, 64), (1, 7, 150)):
        ids_T = torch.arange(T, dtype=torch.int32, device=bench.machine.device)
        yield T, 2, MaskSpec(window, torch.stack([ids_T // each, ids_T // (2 * each)]))


def attend_rounded(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
    """Computes the definition with every operation in the dtype of the inputs."""
    k, v = (x.repeat_interleave(q.size(2) // k.size(2), dim=2) for x in (k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * (scale or q.size(-1) ** -0.5)
    hidden = ~visible(q.size(1), mask, q.device)
    return torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def speed(bench: Bench) -> Iterator[Measure]:
    """TFLOP/s of each path that fits, and the gain of the window over full attention."""
    total, width = (256, 64) if bench.quick else (TOKENS, WIDTH)
    for E, T in [(16, 128)] if bench.quick else SHAPES:
        rows, heads = total // T, width // E
        q, k, v, grad = (bench.random(rows, T, heads, E, seed=i) for i in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        forwards: dict[str, Callable[[], Tensor]] = {}
        work: dict[str, float] = {}
        named = masks(bench, rows, T)
        for (name, mask), path in itertools.product(named.items(), paths(bench)):
            if fits(path, kind_of(mask, T)) and (not path.by_shape or (E, T) in BY_SHAPE):
                place = figure(E, T, name, path.name)
                prepared = path.prepare(mask, T, bench.machine.device)
                forwards[place] = partial(bound(path.attend, prepared), q, k, v)
                work |= {f"{place} {way}": n * 4 * rows * heads * E * pairs(mask, T) for way, n in FLOPS.items()}
        taken = bench.passes(forwards, inputs, grad)
        yield from (Measure(name, "TFLOP/s", rates(work[name] / 1e12, seconds)) for name, seconds in taken.items())
        for path, way in itertools.product(paths(bench), FLOPS):
            full, window, _ = (f"{figure(E, T, name, path.name)} {way}" for name in named)
            if full in taken and window in taken:
                yield Measure(window + OVER_FULL, "×", ratios(taken[full], taken[window]))


def figure(E: int, T: int, mask: str, path: str) -> str:
    """Returns a figure's name without its pass."""
    return f"head dim {E}, {T} tokens, {mask}: {path}"


def masks(bench: Bench, rows: int, T: int) -> dict[str, MaskSpec]:
    """Returns masks by name. Documents have random lengths, 2,048 tokens on average but at most half a row."""
    window = T // 4 if bench.quick else min(WINDOW, T // 4)
    begins_BT = torch.rand(rows, T, generator=torch.Generator().manual_seed(bench.seed)) < max(8 / TOKENS, 2 / T)
    documents_BT = begins_BT.cumsum(1).int().to(bench.machine.device)
    return {"full": MaskSpec(), f"window {window}": MaskSpec(window), "documents": MaskSpec(None, documents_BT)}


def pairs(mask: MaskSpec, T: int) -> float:
    """Returns the number of pairs of query and key that see each other, on average over the rows."""
    positions = torch.arange(T)
    seen = positions + 1
    if mask.window is not None:
        seen = seen.clamp(max=int(mask.window))
    if mask.documents_BT is not None:
        ids = mask.documents_BT.cpu().contiguous()
        seen = torch.minimum(seen, positions - torch.searchsorted(ids, ids) + 1)
    return seen.double().sum(-1).mean().item()
