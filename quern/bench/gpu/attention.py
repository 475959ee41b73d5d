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

import torch
from torch import Tensor

from quern.bench.gpu.setup import GpuBench, worst_error
from quern.bench.kernels import Case, attention_seconds, example_masks
from quern.bench.measure import Figure, figure
from quern.kernels.attention.attend import MaskSpec, attend_plain, visible
from quern.kernels.attention.autotune import available, fits, kind_of
from quern.kernels.attention.backends import BLOCKED, SDPA, AttendFunction, Backend

TOKENS, WIDTH, WINDOW = 16_384, 2048, 1024
SHAPES = [(128, T) for T in (16_384, 4096, 1024, 2048, 8192)] + [(64, T) for T in (16_384, 4096, 1024)]
BY_SHAPE = ((128, 16_384), (128, 4096))
EXACTNESS = (("bfloat16", 128), ("bfloat16", 64), ("float16", 128), ("bfloat16", 256), ("bfloat16", 32))
FLOPS = {"forward": 1.0, "backward": 2.5}
OVER_FULL = ", over full"


def paths(bench: GpuBench) -> list[Backend]:
    return available(bench.machine) if bench.on_gpu else [BLOCKED, SDPA]


def exactness(bench: GpuBench) -> Iterator[Figure]:
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
            bench.failed(place, error)
        else:
            yield figure(place, "relative", *worst)


def bound(attend: AttendFunction, mask: MaskSpec) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(q, k, v, mask, None)


def grid(bench: GpuBench) -> Iterator[tuple[int, int, MaskSpec]]:
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


def speed(bench: GpuBench) -> Iterator[Figure]:
    """TFLOP/s of each path that fits, and the gain of the window over full attention."""
    total, width = (256, 64) if bench.quick else (TOKENS, WIDTH)
    for E, T in [(16, 128)] if bench.quick else SHAPES:
        rows, heads = total // T, width // E
        window = T // 4 if bench.quick else min(WINDOW, T // 4)
        # Documents have 2,048 tokens on average, but at most half a row.
        masks = example_masks(bench, rows, T, window, max(8 / TOKENS, 2 / T))
        cases: dict[str, Case] = {
            name: (name, mask, path)
            for (kind, mask), path in itertools.product(masks.items(), paths(bench))
            if fits(path, kind_of(mask, T)) and (not path.by_shape or (E, T) in BY_SHAPE)
            for name in [place(E, T, kind, path.name)]
        }
        taken = attention_seconds(bench, cases.values(), (rows, T, heads, E))
        for name, seconds in taken.items():
            case, _, way = name.rpartition(" ")
            work = FLOPS[way] * 4 * rows * heads * E * pairs(cases[case][1], T)
            yield figure(name, "TFLOP/s", work / 1e12 / seconds)
        for path, way in itertools.product(paths(bench), FLOPS):
            full, windowed = (f"{place(E, T, kind, path.name)} {way}" for kind in ("full", f"window {window}"))
            if full in taken and windowed in taken:
                yield figure(windowed + OVER_FULL, "×", taken[full] / taken[windowed])


def place(E: int, T: int, mask: str, path: str) -> str:
    """Returns a figure's name without its pass."""
    return f"head dim {E}, {T} tokens, {mask}: {path}"


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
