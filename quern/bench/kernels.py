"""Benchmarks of kernels: attention by path, length and mask, and its errors; training with windows; the loss; rotation;
Muon's iteration.

A path's changes of layout are included, and calls are eager. TFLOP/s of attention count the pairs of query and key that
see each other: 4 · pairs · heads · head dim forward, 2.5 times that backward (FlashAttention-2, arXiv 2307.08691). GB/s
count each input read once and each output written once. The loss is head, softcap and cross-entropy with their
gradients; the child, `python -m quern.bench.kernels`, measures the memory of one of its paths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from quern.bench.material import reference, sizes_of
from quern.bench.measure import Figure, Seconds, Setup, alternate, figure, peak_bytes
from quern.bench.options import DtypeAndHeadDim
from quern.bench.train import take_step, training_state
from quern.kernels import cross_entropy as kernels
from quern.kernels.attention.attend import MaskSpec, attend_plain, visible
from quern.kernels.attention.autotune import BLOCKED, HIDING, PLAIN, SDPA, Backend, Picked, available, fits, kind_of
from quern.kernels.rope import rotate, rotate_plain
from quern.kernels.softcap import Cap, SigmoidCap, TanhCap
from quern.machine import Machine, detect, machine_flags
from quern.model.layers import rotary_table
from quern.optim.muon import polar_express
from quern.process import serve, start
from quern.recipe import Resolved

HEAD_DIM, WINDOW, CONTEXT = 64, 1024, 2048
FLEX, FLEX_SHAPE = "flex_attention", (128, 16_384)
"""torch's attention, and the only shape at which it is compared: it compiles for each shape and mask."""
FLOPS = {"forward": 1.0, "backward": 2.5}
CAP = TanhCap(15.0)


def attention(setup: Setup) -> Iterator[Figure]:
    """Time of each path and mask, on a GPU also TFLOP/s; gains of masks, and of the picked path over SDPA."""
    sizes = setup.sizes
    setup.settings.update(tokens=sizes.tokens, width=sizes.width, picked=str(setup.machine.attention))
    for E, T in sizes.shapes:
        rows, heads, place = sizes.tokens // T, sizes.width // E, f"T={T}{f', head dim {E}' * (E != HEAD_DIM)}"
        masks = example_masks(setup, rows, T)
        compared = [*paths(setup), *([flex(setup)] if setup.on_gpu and (E, T) == FLEX_SHAPE else [])]
        cases = {
            f"{place}, {name}: {path.name}": (mask, path)
            for name, mask in masks.items()
            for path in (*compared, *([BLOCKED] if picked(setup, mask, T) == BLOCKED else []))
            if fits(path, kind_of(mask, T)) or not (setup.on_gpu or path.skips)  # such a path builds dense masks
        }
        cases.pop(f"{place}, documents: {FLEX}", None)  # the blocks of its mask take long
        taken = attention_seconds(setup, cases, (rows, T, heads, E))
        for name, seconds in taken.items():
            yield figure(name, "ms", 1e3 * seconds)
            if setup.on_gpu:
                case, _, way = name.rpartition(" ")
                work = FLOPS[way] * 4 * rows * heads * E * pairs(cases[case][0], T)
                yield figure(f"{name}: rate", "TFLOP/s", work / 1e12 / seconds)
        yield from _gains(setup, place, T, masks, taken)


def _gains(setup: Setup, place: str, T: int, masks: Mapping[str, MaskSpec], taken: Seconds) -> Iterator[Figure]:
    """Yields the ratios of the paths that work: for both passes together, and full / window for each pass."""
    cases = {name.rpartition(" ")[0] for name in taken}
    both = {case: taken[f"{case} forward"] + taken[f"{case} backward"] for case in cases}
    full = None
    for name, mask in masks.items():
        path = picked(setup, mask, T).name
        seconds = both.get(f"{place}, {name}: {path}")
        if seconds is None:
            continue
        if name == "full":
            full = seconds
        elif full is not None:
            yield figure(f"{place}: full / {name}, as picked", "×", full / seconds)
        if path != SDPA.name and (stock := both.get(f"{place}, {name}: {SDPA.name}")) is not None:
            yield figure(f"{place}, {name}: sdpa / {path}", "×", stock / seconds)
    window = next(name for name in masks if name.startswith("window"))
    for case, seconds in taken.items():
        path = case.removeprefix(f"{place}, {window}: ")
        if path != case and (whole := taken.get(f"{place}, full: {path}")) is not None:
            yield figure(f"{place}: full / {window}, {path}", "×", whole / seconds)


def picked(setup: Setup, mask: MaskSpec, T: int) -> Backend:
    chosen = setup.machine.attention
    return chosen.path(mask, T) if isinstance(chosen, Picked) else BLOCKED


def paths(setup: Setup) -> list[Backend]:
    return available(setup.machine) if setup.on_gpu else [BLOCKED, SDPA, PLAIN]


def flex(setup: Setup) -> Backend:
    """torch's flex_attention, to compare with: no model uses it. It makes the blocks of a mask once."""
    from torch.nn.attention import flex_attention as flexible

    functions: tuple[Any, Any] = (flexible.flex_attention, flexible.create_block_mask)
    attend, make_blocks = setup.compiled(functions[0]), functions[1]  # whose sort would compile for minutes
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

    return Backend(FLEX, attend_flex, HIDING)


def example_masks(setup: Setup, rows: int, T: int) -> dict[str, MaskSpec]:
    """Returns masks by name: full, a window, documents of random lengths, a quarter of a row on average."""
    window = min(WINDOW, T // 4)
    begins_BT = torch.rand(rows, T, generator=torch.Generator().manual_seed(setup.seed)) < 4 / T
    documents_BT = begins_BT.cumsum(1).int().to(setup.machine.device)
    return {"full": MaskSpec(), f"window {window}": MaskSpec(window), "documents": MaskSpec(None, documents_BT)}


def attention_seconds(setup: Setup, cases: Mapping[str, tuple[MaskSpec, Backend]], shape: tuple[int, ...]) -> Seconds:
    """Times the cases that work, which alternate, by "<name> forward" and "<name> backward". shape: (B, T, H, E)."""
    q, k, v, grad = (setup.random(*shape, seed=i) for i in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    forwards = {name: partial(path.attend, q, k, v, mask, None) for name, (mask, path) in cases.items()}
    return setup.passes(forwards, inputs, grad)


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


def exactness(setup: Setup) -> Iterator[Figure]:
    """The worst error over the grid, by path, dtype and head dim; also of the definition computed in the dtype."""
    rounded = Backend("definition", attend_rounded, HIDING)
    asked = [setup.only] if setup.only else get_args(DtypeAndHeadDim)
    kinds = [(dtype, int(E)) for dtype, E in (name.split("-") for name in (["float32-16"] if setup.quick else asked))]
    for (dtype, E), path in itertools.product(kinds, [*paths(setup), rounded]):
        place, worst = f"{path.name}, {dtype}, head dim {E}: error", (0.0, "")
        try:
            for T, groups, mask in grid(setup):
                if fits(path, kind_of(mask, T)) and (path.skips or T > 1):  # cuDNN takes no single token
                    shapes = enumerate((4, 4 // groups, 4 // groups, 4))
                    *inputs, grad = (setup.random(2, T, H, E, dtype=getattr(torch, dtype), seed=i) for i, H in shapes)
                    ours, plain = (partial(way, mask=mask, scale=None) for way in (path.attend, attend_plain))
                    ids = ", documents" * (mask.documents_BT is not None)
                    case = f"{T} tokens, groups of {groups}, window {mask.window}{ids}"
                    worst = max(worst, (worst_error(ours, plain, inputs, grad), case))
            yield figure(place, "relative", *worst)
        except Exception as error:  # kernels, drivers and the compiler raise errors of any type
            setup.failed(place, error)


def grid(setup: Setup) -> Iterator[tuple[int, int, MaskSpec]]:
    """Yields length, groups and mask of each case."""
    lengths = (1, 17, 65) if setup.quick or not setup.on_gpu else (1, 17, 127, 129, 1000, 2049)
    for T, window, groups in itertools.product(lengths, (None, 1, 64, 66, 5000), (1, 2, 4)):
        yield T, groups, MaskSpec(window)
    for T, window, each in itertools.product(lengths, (None, 64), (1, 7, 150)):
        ids_T = torch.arange(T, dtype=torch.int32, device=setup.machine.device)
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


def windows(setup: Setup) -> Iterator[Figure]:
    """Tokens/s of training, and the gain of windows over the two other ways."""
    machine = setup.machine
    recipe = reference(setup.quick, setup.seed, device=machine.device.type)
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
    machine, sizes = setup.machine, setup.sizes.loss
    setup.settings.update(zip(("tokens", "width", "vocabulary"), sizes, strict=True), softcap=str(CAP))
    whole = ["full", "full, compiled"] if machine.compile else ["full"]
    whole = whole[-1:] if setup.on_gpu else whole  # the eager one holds more than some GPUs have
    inputs, losses = mean_losses(setup, *sizes)
    for cap in (CAP, SigmoidCap(30.0, 7.5 * sizes[1] ** 0.5)):
        ours, plain = (partial(losses[name], cap=cap) for name in ("chunked", "full"))
        # The gradient of the sum over tokens: that of the mean is so small that `worst_error` takes it for zero.
        grad = torch.full((), float(sizes[0]), device=machine.device)
        error = worst_error(ours, plain, [inputs[0][:2048], inputs[1]], grad)
        yield figure(f"chunked, {cap}: error", "relative", error)
    jobs = {name: partial(gradients, loss, inputs) for name, loss in losses.items()}
    taken = setup.seconds({name: jobs[name] for name in ["chunked", *whole]})
    names, whole = list(taken), [name for name in whole if {name, "chunked"} <= taken.keys()]
    yield from (figure(f"{name}: time", "ms", 1e3 * taken[name]) for name in names)
    yield from (figure(f"{name} / chunked: time", "×", taken[name] / taken["chunked"]) for name in whole)
    # On a CPU in processes of their own: memory that an earlier call has freed, and the allocator keeps, would count.
    order = {"sizes": sizes, "seed": setup.seed, "machine": machine_flags(machine)}
    held: dict[str, Any] = {}
    for name in names:
        if setup.on_gpu:
            held[name] = peak_bytes(jobs[name], machine)
            continue
        with start("quern.bench.kernels", name, order | {"name": name}) as process:
            held[name] = process.answer()["bytes"]
    if None in held.values():
        setup.log("memory is left out: this system does not report what a single call takes")
        return
    yield from (figure(f"{name}: memory", "MB", held[name] / 1e6) for name in names)
    yield from (figure(f"{name} / chunked: memory", "×", held[name] / held["chunked"]) for name in whole)


def mean_losses(setup: Setup, N: int, D: int, V: int) -> tuple[list[Tensor], dict[str, Callable[..., Tensor]]]:
    """Returns random hidden states and a random head, which require gradients, and the mean loss by path, as functions
    of (x, weight, cap); x holds the first of N tokens."""
    inputs = [setup.random(N, D).requires_grad_(), setup.random(V, D, seed=1).mul_(D**-0.5).requires_grad_()]
    targets_N = torch.randint(V, (N,), generator=torch.Generator().manual_seed(setup.seed)).to(setup.machine.device)
    scale_N = torch.full((N,), 1 / N, device=setup.machine.device)

    def chunked(x: Tensor, weight: Tensor, cap: Cap = CAP) -> Tensor:
        return kernels.cross_entropy(x, weight, targets_N[: len(x)], scale_N[: len(x)], cap)[0]

    def full(x: Tensor, weight: Tensor, cap: Cap = CAP) -> Tensor:
        return (kernels.cross_entropy_plain(x, weight, targets_N[: len(x)], cap) * scale_N[: len(x)]).sum()

    return inputs, {"chunked": chunked, "full": full, "full, compiled": setup.compiled(full)}


def gradients(loss: Callable[..., Tensor], inputs: Sequence[Tensor]) -> object:
    return torch.autograd.grad(loss(*inputs), inputs)


def rope(setup: Setup) -> Iterator[Figure]:
    """GB/s and error of the rotation, alone and with the norm of queries and keys."""
    B, T, H, E = (2, 16, 2, 8) if setup.quick else (256 if setup.on_gpu else 32, 2048, 6, 128)
    x, grad = setup.random(B, T, H, E).requires_grad_(), setup.random(B, T, H, E, seed=1)
    cos, sin = rotary_table(torch.arange(T, device=x.device)[None], E, 1e5)
    # The gain of the norm, and the tensors that are moved backward.
    for name, gain, tensors_back in (("rotation", {}, 2), ("norm and rotation", {"gain": 1.2}, 3)):
        ours, plain = (partial(turn, cos=cos, sin=sin, **gain) for turn in (rotate, rotate_plain))
        for label, turn in (("ours", ours), ("plain", plain)):
            yield figure(f"{name}: error, {label}", "relative", worst_error(turn, plain, [x], grad))
        turns = {"ours": ours, "plain, compiled": setup.compiled(plain)}
        forwards = {f"{name}: {label}": partial(turn, x) for label, turn in turns.items()}
        for job, seconds in setup.passes(forwards, [x], grad).items():
            tensors = 2 if job.endswith("forward") else tensors_back
            yield figure(job, "GB/s", tensors * x.nbytes / 1e9 / seconds)


def muon(setup: Setup) -> Iterator[Figure]:
    """Time of the iteration over the matrices of 12 layers."""
    width, layers = (32, 2) if setup.quick else (768, 12)
    for name, count, factor in (("attention's", 4, 1), ("feed-forward's", 2, 4)):
        job = partial(setup.compiled(polar_express), setup.random(count * layers, width, factor * width))
        for place, seconds in setup.seconds({f"{name} matrices": job}).items():
            yield figure(place, "ms", 1e3 * seconds)


def answers(order: dict[str, Any], _: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Runs in its own process: answers with the memory of one call."""
    setup = Setup(machine=detect(**order["machine"]), seed=order["seed"])
    inputs, losses = mean_losses(setup, *order["sizes"])
    job = partial(gradients, losses[order["name"]], inputs)
    job()  # compiles
    yield {"bytes": peak_bytes(job, setup.machine)}


if __name__ == "__main__":
    serve(answers)
