"""Sections of `quern bench gpu` about attention: how exact each path is, and how fast.

Exactness: every path that skips what masks hide, against the plain definition in fp32 on the same inputs, forward and
gradients, over lengths, windows, documents and groups. Two figures for each dtype and head dim, the worst of the grid:
the error itself (2-norm, relative) and the error over that of the definition computed in that dtype throughout.

Speed: TFLOP/s over the pairs of query and key that see each other: 4 · pairs · heads · head dim forward, 2.5 times that
backward (FlashAttention-2, arXiv 2307.08691). 16,384 tokens a call in rows of 1,024 to 16,384; 2,048 / head dim heads.
What compiles for each shape, as flex_attention does, only at 16,384 and 4,096 tokens and a head dim of 128.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quern.bench.gpu.setup import Bench, Timed, first_line
from quern.bench.record import Measure, ratios
from quern.kernels.attention.attend import MaskSpec, attend_plain, visible
from quern.kernels.attention.autotune import available, fits, kind_of
from quern.kernels.attention.backends import BLOCKED, SDPA, Backend

TOKENS, WIDTH, WINDOW = 16_384, 2048, 1024
LENGTHS = {128: (16_384, 4096, 1024, 2048, 8192), 64: (16_384, 4096, 1024)}
BY_SHAPE = ((128, 16_384), (128, 4096))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Case = tuple[int, int, MaskSpec]
"""Length, groups, mask."""


def paths(bench: Bench) -> list[Backend]:
    return [BLOCKED, SDPA] if bench.machine.device.type == "cpu" else available(bench.machine)


# Exactness ----------------------------------------------------------------------------------------------------


def exactness(bench: Bench) -> Iterator[Measure]:
    """The worst errors over the grid, by path, dtype and head dim."""
    kinds = [("fp32", 16)] if bench.quick else [("bf16", 128), ("bf16", 64), ("fp16", 128), ("bf16", 256), ("bf16", 32)]
    for (dtype, E), path in itertools.product(kinds, paths(bench)):
        if not path.windows or path.by_shape:
            continue
        worst: dict[str, tuple[float, str]] = {"error": (0.0, ""), "error over the dtype's own": (0.0, "")}
        try:
            for case in grid(bench):
                bench.check_time()
                if not fits(path, kind_of(case[2], case[0])):
                    continue
                for name, value in errors(bench, path, case, DTYPES[dtype], E).items():
                    if not value <= worst[name][0]:  # NaN is the worst
                        worst[name] = value, describe_case(case)
        except (RuntimeError, ValueError) as error:
            bench.problems.append(f"{path.name}, {dtype}, head dim {E}: {first_line(error)}")
            continue
        for name, (value, where) in worst.items():
            yield Measure(f"{path.name}, {dtype}, head dim {E}: {name}", "relative", (value,), where)


def grid(bench: Bench) -> Iterator[Case]:
    lengths = (1, 17, 65) if bench.quick else (1, 17, 127, 129, 1000, 2049)
    for T, window, groups in itertools.product(lengths, (None, 1, 64, 66, 5000), (1, 2, 4)):
        yield T, groups, MaskSpec(window)
    for T, window, each in itertools.product(lengths, (None, 64), (1, 7, 150)):
        ids_T = torch.arange(T, dtype=torch.int32, device=bench.machine.device)
        yield T, 2, MaskSpec(window, torch.stack([ids_T // each, ids_T // (2 * each)]))


def describe_case(case: Case) -> str:
    T, groups, mask = case
    documents = "" if mask.documents_BT is None else f", {int(mask.documents_BT[0, -1]) + 1} documents"
    return f"{T} tokens, window {mask.window}, groups of {groups}{documents}"


def errors(bench: Bench, path: Backend, case: Case, dtype: torch.dtype, E: int) -> dict[str, float]:
    """The largest over y and the gradients of q, k and v."""
    T, groups, mask = case
    heads = (4, 4 // groups, 4 // groups, 4)
    inputs = [bench.random(2, T, H, E, dtype=dtype, seed=i) for i, H in enumerate(heads)]
    exact = with_gradients(attend_plain, [x.float() for x in inputs], mask)
    ours = with_gradients(path.attend, inputs, path.prepare(mask, T, bench.machine.device))
    rounded = with_gradients(attend_rounded, inputs, mask)
    found = {"error": 0.0, "error over the dtype's own": 0.0}
    unit = torch.finfo(dtype).eps / 4
    for a, b, e in zip(ours, rounded, exact, strict=True):
        size = e.norm().item()
        if size < 1e-6 * math.sqrt(e.numel()):
            continue  # over one key: a gradient that is zero but for rounding
        off, own = ((x.float() - e).norm().item() / size for x in (a, b))
        # Where the dtype is exact, ours may be off by a rounding of what is stored.
        for name, value in (("error", off), ("error over the dtype's own", off / max(own, unit))):
            found[name] = max(found[name], value) if math.isfinite(value) else math.inf
    return found


def attend_rounded(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
    """The definition with every operation in the inputs' dtype."""
    groups = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * (scale or q.size(-1) ** -0.5)
    hidden = ~visible(q.size(1), mask, q.device)
    return torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def with_gradients(attend: Callable[..., Tensor], inputs: list[Tensor], mask: MaskSpec) -> list[Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    y = attend(q, k, v, mask, None)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), inputs[3])]


# Speed --------------------------------------------------------------------------------------------------------


def speed(bench: Bench) -> Iterator[Measure]:
    """TFLOP/s of every path that fits, and what the window spares."""
    shapes = [(E, T) for E, lengths in LENGTHS.items() for T in lengths]
    for E, T in [(16, 128)] if bench.quick else shapes:
        yield from shape_speed(bench, E, T, masks(bench, T))


def masks(bench: Bench, T: int) -> dict[str, MaskSpec]:
    """By name. Documents have random lengths, an eighth of 16,384 tokens on average but at most half a row."""
    rows = (256 if bench.quick else TOKENS) // T
    window = T // 4 if bench.quick else min(WINDOW, T // 4)
    numbers = torch.Generator().manual_seed(bench.seed)
    begins_BT = torch.rand(rows, T, generator=numbers) < max(8 / TOKENS, 2 / T)
    documents_BT = begins_BT.cumsum(1).int().to(bench.machine.device)
    return {"full": MaskSpec(), f"window {window}": MaskSpec(window), "documents": MaskSpec(None, documents_BT)}


def pairs(mask: MaskSpec, T: int) -> float:
    """How many pairs of query and key see each other, on average over the rows."""
    positions = torch.arange(T)
    seen = positions + 1
    if mask.window is not None:
        seen = seen.clamp(max=int(mask.window))
    if mask.documents_BT is not None:
        ids = mask.documents_BT.cpu().contiguous()
        begins = torch.searchsorted(ids, ids)
        seen = torch.minimum(seen, positions - begins + 1)
    return seen.double().sum(-1).mean().item()


def figure(E: int, T: int, mask: str, path: str, way: str) -> str:
    """A figure's name."""
    return f"head dim {E}, {T} tokens, {mask}: {path} {way}"


def over_full(name: str) -> str:
    """The name of how much faster a figure's mask is than none."""
    return f"{name}, over full"


def shape_speed(bench: Bench, E: int, T: int, named: dict[str, MaskSpec]) -> Iterator[Measure]:
    rows = (256 if bench.quick else TOKENS) // T
    heads = (64 if bench.quick else WIDTH) // E
    q, k, v, grad = (bench.random(rows, T, heads, E, seed=i) for i in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    jobs: dict[str, Timed] = {}
    flops: dict[str, float] = {}
    for name, mask in named.items():
        for path in paths(bench):
            bench.check_time()
            if not fits(path, kind_of(mask, T)) or (path.by_shape and (E, T) not in BY_SHAPE):
                continue
            prepared = path.prepare(mask, T, bench.machine.device)
            forward, backward = both_ways(path, inputs, grad, prepared)
            ways = [figure(E, T, name, path.name, way) for way in ("forward", "backward")]
            if not bench.works(ways[1], backward):
                continue
            work = 4 * rows * heads * E * pairs(mask, T)
            jobs |= {ways[0]: forward, ways[1]: backward}
            flops |= {ways[0]: work, ways[1]: 2.5 * work}
    taken = bench.rounds(jobs)
    for name, seconds in taken.items():
        yield Measure(name, "TFLOP/s", tuple(flops[name] / one / 1e12 for one in seconds))
    window = next(name for name in named if name.startswith("window"))
    for name, seconds in taken.items():
        other = name.replace(", full: ", f", {window}: ")
        if ", full: " in name and other in taken:
            yield Measure(over_full(other), "×", ratios(seconds, taken[other]))


def both_ways(path: Backend, inputs: list[Tensor], grad: Tensor, mask: MaskSpec) -> tuple[Timed, Timed]:
    """The forward pass, and the backward pass after a forward pass that is not timed."""

    def forward(_: object = None) -> Tensor:
        return path.attend(inputs[0], inputs[1], inputs[2], mask, None)

    return Timed(forward), Timed(lambda y: torch.autograd.grad(y, inputs, grad), before=forward)
