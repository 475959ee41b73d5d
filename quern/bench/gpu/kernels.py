"""Sections of `quern bench gpu` about kernels and decoding: exactness against the plain definition in fp32, and speed.

TFLOP/s of attention count the pairs of query and key that see each other: 4 · pairs · heads · head dim forward, 2.5
times that backward (FlashAttention-2, arXiv 2307.08691). GB/s count each input read once and each output written once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quern.bench.gpu.train import GpuBench, recipe_of
from quern.bench.kernels import CAP, attention_seconds, example_masks, loss_inputs, loss_jobs, loss_paths
from quern.bench.measure import Figure, figure, peak_bytes
from quern.compiler import TRITON_FOUND
from quern.generate.cache import KVCache, decode
from quern.generate.compiled import SPAN, CompiledDecode
from quern.kernels import cross_entropy as kernels
from quern.kernels.attention.attend import MaskSpec, attend_plain, visible
from quern.kernels.attention.autotune import BLOCKED, HIDING, SDPA, AttendFunction, Backend, available, fits, kind_of
from quern.kernels.rope import rotate, rotate_plain
from quern.kernels.softcap import SigmoidCap
from quern.model.count import parameters
from quern.model.layers import rotary_table
from quern.optim.muon import polar_express
from quern.recipe import Resolved
from quern.train.state import build_model

TOKENS, WIDTH, WINDOW = 16_384, 2048, 1024
SHAPES = [(128, T) for T in (16_384, 4096, 1024, 2048, 8192)] + [(64, T) for T in (16_384, 4096, 1024)]
EXACTNESS = (("bfloat16", 128), ("bfloat16", 64), ("float16", 128), ("bfloat16", 256), ("bfloat16", 32))
BY_SHAPE = ((128, 16_384), (128, 4096))
"""The shapes of flex_attention, which compiles for each."""
FLOPS = {"forward": 1.0, "backward": 2.5}
OVER_FULL = ", over full"


def paths(bench: GpuBench) -> list[Backend]:
    return available(bench.machine) if bench.on_gpu else [BLOCKED, SDPA]


def flex(bench: GpuBench) -> Backend:
    """torch's flex_attention, to compare with: no model uses it. It makes the blocks of a mask once."""
    from torch.nn.attention import flex_attention as flexible

    functions: tuple[Any, Any] = (flexible.flex_attention, flexible.create_block_mask)
    attend, make_blocks = map(bench.compiled, functions)
    made: dict[int, tuple[MaskSpec, Any]] = {}

    def attend_flex(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        (B, T, H, _), K, ids_BT = q_BTHE.shape, k_BTKE.size(2), mask.documents_BT

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            near = (q >= k) & (q - k < (mask.window or T))
            return near if ids_BT is None else near & (ids_BT[b, q] == ids_BT[b, k])

        if id(mask) not in made:
            made[id(mask)] = mask, make_blocks(sees, None if ids_BT is None else B, None, T, T, q_BTHE.device)
        heads_first = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        return attend(*heads_first, block_mask=made[id(mask)][1], scale=scale, enable_gqa=K != H).transpose(1, 2)

    return Backend("flex_attention", attend_flex, HIDING)


def exactness(bench: GpuBench) -> Iterator[Figure]:
    """The worst error over the grid, by path, dtype and head dim; also of the definition computed in the dtype."""
    rounded = Backend("definition", attend_rounded, HIDING)
    kinds = (("float32", 16),) if bench.quick else EXACTNESS
    for (dtype, E), path in itertools.product(kinds, [*paths(bench), rounded]):
        if not path.skips:
            continue
        place, worst = f"{path.name}, {dtype}, head dim {E}: error", (0.0, "")
        try:
            for T, groups, mask in grid(bench):
                bench.check_time()
                if fits(path, kind_of(mask, T)):
                    shapes = enumerate((4, 4 // groups, 4 // groups, 4))
                    *inputs, grad = (bench.random(2, T, H, E, dtype=getattr(torch, dtype), seed=i) for i, H in shapes)
                    ours, plain = bound(path.attend, mask), bound(attend_plain, mask)
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


def worst_error(
    function: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> float:
    """Returns the largest relative error (2-norm) of the output and the gradients, against `plain` in fp32."""

    def with_gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]

    worst = 0.0
    for x, e in zip(with_gradients(function, inputs[0].dtype), with_gradients(plain, torch.float32), strict=True):
        size = e.norm().item()
        if size >= 1e-6 * math.sqrt(e.numel()):  # smaller gradients are zero except for rounding
            error = (x.float() - e).norm().item() / size
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


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
        compared = [*paths(bench), *([flex(bench)] if bench.on_gpu and (E, T) in BY_SHAPE else [])]
        cases = {
            place(E, T, kind, path.name): (mask, path)
            for (kind, mask), path in itertools.product(masks.items(), compared)
            if fits(path, kind_of(mask, T))
        }
        taken = attention_seconds(bench, cases, (rows, T, heads, E))
        for name, seconds in taken.items():
            case, _, way = name.rpartition(" ")
            work = FLOPS[way] * 4 * rows * heads * E * pairs(cases[case][0], T)
            yield figure(name, "TFLOP/s", work / 1e12 / seconds)
        for path, way in itertools.product(compared, FLOPS):
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


def rope(bench: GpuBench) -> Iterator[Figure]:
    """GB/s and error of the rotation, alone and with the norm of queries and keys."""
    B, T, H, E = (2, 16, 2, 8) if bench.quick else (32, 2048, 6, 128)
    x, grad = bench.random(B, T, H, E).requires_grad_(), bench.random(B, T, H, E, seed=1)
    cos, sin = rotary_table(torch.arange(T, device=x.device)[None], E, 1e5)
    turned, normed = {"cos": cos, "sin": sin}, {"cos": cos, "sin": sin, "gain": 1.2}
    kinds = {  # the kernel, the plain definition, tensors moved backward
        "rotation": (partial(rotate, **turned), partial(rotate_plain, **turned), 2),
        "norm and rotation": (partial(rotate, **normed), partial(rotate_plain, **normed), 3),
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
    """Time of the iteration over the matrices of 12 layers."""
    width, layers = (32, 2) if bench.quick else (768, 12)
    for name, count, factor in (("attention's", 4, 1), ("feed-forward's", 2, 4)):
        job = partial(bench.compiled(polar_express), bench.random(count * layers, width, factor * width))
        for place, seconds in bench.seconds({f"{name} matrices": job}).items():
            yield figure(place, "ms", 1e3 * seconds)


ROWS = (1, 8, 64)
PROMPT_TOKENS = 512


@torch.inference_mode()
def decoding(bench: GpuBench) -> Iterator[Figure]:
    """Speed without sampling, and share of the bandwidth of a large copy, at batch 1, 8 and 64."""
    recipe, machine, prompt = recipe_of(bench), bench.machine, 16 if bench.quick else PROMPT_TOKENS
    model = build_model(recipe, machine, recipe.seed).eval()
    step, capacity, way = partial(decode, model), recipe.model.context, "eager"
    if machine.compile:
        step = compiled = CompiledDecode(model, capacity)
        capacity, way = compiled.max_tokens, "compiled"
    for rows in ROWS[:2] if bench.quick else ROWS:
        bench.check_time()
        if machine.compile:
            compiled.warm_up(rows)
        cache = KVCache(model, rows, capacity)
        numbers = torch.Generator().manual_seed(bench.seed)
        tokens = torch.randint(model.embedding.num_embeddings, (rows, prompt), generator=numbers).to(machine.device)
        cache.prefill(model, tokens, torch.full((rows,), prompt, device=machine.device), machine.attention)
        slots_S = torch.arange(min(capacity, prompt + SPAN), device=machine.device)
        arguments = cache, cache.positions_B.clone(), tokens[:, 0].contiguous(), slots_S
        once, place = partial(_one_token, step, *arguments), f"batch {rows}, {way}"
        taken = bench.seconds({place: once})
        if bench.on_gpu:
            taken |= bench.seconds({f"{place}, CUDA graph": once}, graph=True)
        moved = bytes_of_a_step(recipe, cache, rows, prompt + 1)
        for name, seconds in taken.items():
            share = 100 * moved / bench.limits.bytes_per_second / seconds
            yield figure(f"{name}: speed", "tokens/s", rows / seconds)
            yield figure(f"{name}: of the bandwidth", "%", share, f"{moved / 1e6:,.0f} MB a step")


def _one_token(step: Callable[..., Any], cache: KVCache, positions_B: Tensor, *arguments: Tensor) -> object:
    """Decodes a token from the same positions at each call, so that its cost stays equal."""
    cache.positions_B.copy_(positions_B)
    return step(cache, *arguments)


def bytes_of_a_step(recipe: Resolved, cache: KVCache, rows: int, seen: int) -> int:
    """Returns the bytes of the weights that multiply each token, and of the keys and values that each query sees."""
    shape = recipe.model
    slots = sum(min(ring, seen) for ring in cache.rings if ring)
    values = parameters(recipe).kaplan + rows * 2 * slots * shape.kv_heads * shape.head_dim
    return cache.keys_BKRE[0].element_size() * values
