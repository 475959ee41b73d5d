"""Law: a kernel equals its plain twin, forward and backward, over odd shapes; the check catches broken ones.

fp32: the largest difference, relative to the largest entry. bf16: the error against float64, as a multiple of the
error that the same formula makes when each of its operations is rounded to bf16.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quern.kernels import cross_entropy as module
from quern.kernels.attention import attend, attend_plain, visible
from quern.kernels.cross_entropy import CHUNK_TOKENS, cross_entropy, cross_entropy_plain
from tests.train.toy import eager

__all__ = ["eager"]  # a fixture

FP32_BAR = 1e-5
BF16_BAR = 1.1
LENGTHS = (1, 17, 127, 129, 512, 700)
WINDOWS = (None, 1, 64, 66, 1000)  # 66 reaches just past a multiple of 64, where blocks begin
GROUPS = (1, 2, 4)
SOFTCAP = 15.0

Attend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
Law = Callable[[str, float | int | str, str], None]


def deviation(ours: list[Tensor], reference: list[Tensor]) -> float:
    """The largest difference over tensors, each relative to its largest entry (absolute where that is below 1e-3,
    as with the gradients of a softmax over one key, which are zero)."""
    worst = 0.0
    for a, b in zip(ours, reference, strict=True):
        assert a.shape == b.shape
        size = b.abs().max().item()
        difference = (a.double() - b.double()).abs().max().item() / (size if size > 1e-3 else 1.0)
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


# Attention --------------------------------------------------------------------------------------------------


def attention_inputs(T: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * T + groups)
    sizes = [(2, T, 4, 8), (2, T, 4 // groups, 8), (2, T, 4 // groups, 8), (2, T, 4, 8)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def with_gradients(path: Attend, inputs: list[Tensor], window: int | None) -> list[Tensor]:
    """y and the gradients of q, k, v for a random gradient of y."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    y = path(q, k, v, window)
    assert y.dtype == q.dtype
    y.backward(inputs[3].to(y.dtype))
    return [y.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def attention_deviation(path: Attend, lengths: tuple[int, ...] = LENGTHS) -> float:
    worst = 0.0
    for T, window, groups in itertools.product(lengths, WINDOWS, GROUPS):
        inputs = attention_inputs(T, groups, torch.float32)
        ours = with_gradients(path, inputs, window)
        worst = max(worst, deviation(ours, with_gradients(attend_plain, inputs, window)))
    return worst


def in_float64(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The definition once more, in the inputs' dtype throughout: with float64 the reference, with bf16 the
    error that bf16 makes by itself."""
    groups = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * q.size(-1) ** -0.5
    hidden = ~visible(q.size(1), window, q.device)
    return torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def bf16_error_ratio(path: Attend, T: int, window: int | None, groups: int) -> float:
    """Largest over y, dq, dk, dv: our error over bf16's own, both in 2-norm against float64."""
    inputs = attention_inputs(T, groups, torch.bfloat16)
    exact = with_gradients(in_float64, [x.double() for x in inputs], window)
    ours, rounded = (with_gradients(p, inputs, window) for p in (path, in_float64))
    ratios = [0.0]
    for a, b, reference in zip(ours, rounded, exact, strict=True):
        ours_off, bf16_off = ((x.double() - reference).norm().item() for x in (a, b))
        # Where bf16 is exact (one visible key), ours may be off by a rounding of what is stored.
        floor = reference.norm().item() * 2**-9 + 1e-12
        ratios.append(ours_off / max(bf16_off, floor))
    return max(ratio if math.isfinite(ratio) else math.inf for ratio in ratios)


def test_attention_is_its_plain_twin_in_fp32(law: Law) -> None:
    worst = attention_deviation(attend)
    law("blocked attention = plain twin, y and gradients, 90 shapes", worst, f"≤ {FP32_BAR:g} relative, fp32")
    assert worst <= FP32_BAR


def test_attention_in_bf16_is_as_good_as_bf16(law: Law) -> None:
    shapes = itertools.product((1, 17, 129, 512, 700), WINDOWS, GROUPS)
    worst = max(bf16_error_ratio(attend, *shape) for shape in shapes)
    law("blocked attention in bf16: its error over bf16's own", worst, f"≤ {BF16_BAR:g}")
    assert worst <= BF16_BAR


def broken_attention(mistake: str) -> Attend:
    """Attention with one of the mistakes that have been made."""

    def path(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if mistake == "window one too wide":
            return attend(q, k, v, None if window is None else window + 1)
        if mistake == "window ignored":
            return attend(q, k, v, None)
        if mistake == "heads grouped the wrong way round":
            groups = q.size(2) // k.size(2)
            return attend(q, k.repeat(1, 1, groups, 1), v.repeat(1, 1, groups, 1), window)
        if mistake == "keys detached":
            return attend(q, k.detach() + 0 * k, v, window)
        return attend(q * 1.001, k, v, window)  # a scale that is slightly off

    return path


@pytest.mark.parametrize(
    "mistake",
    [
        "window one too wide",
        "window ignored",
        "heads grouped the wrong way round",
        "keys detached",
        "scale off by a thousandth",
    ],
)
def test_the_attention_check_can_fail(mistake: str) -> None:
    assert attention_deviation(broken_attention(mistake), (129,)) > 10 * FP32_BAR


# Cross-entropy ----------------------------------------------------------------------------------------------

LossPath = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
SIZES = (1, 7, 1000, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 300)


def plain(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    losses = cross_entropy_plain(x, weight, targets, softcap)
    return (losses * scale).sum(), losses


def loss_inputs(N: int, V: int, D: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits up to about the softcap; a third of the targets masked, the others weighted, some negatively."""
    generator = torch.Generator().manual_seed(N)
    x = torch.randn(N, D, generator=generator)
    weight = 1.5 * torch.randn(V, D, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    scale = torch.randn(N, generator=generator) * (torch.rand(N, generator=generator) > 1 / 3) / N
    scale[0] = 1 / N
    return x, weight, targets, scale


def loss_with_gradients(path: LossPath, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Losses, and the gradients of x and of the head's weight."""
    x, weight = (part.detach().clone().requires_grad_() for part in inputs[:2])
    total, losses = path(x, weight, *inputs[2:], SOFTCAP)
    total.backward()
    assert x.grad is not None and weight.grad is not None
    return [losses.detach(), x.grad, weight.grad]


def loss_deviation(path: LossPath, sizes: tuple[int, ...] = SIZES, vocabularies: tuple[int, ...] = (37, 1001)) -> float:
    return max(
        deviation(loss_with_gradients(path, inputs), loss_with_gradients(plain, inputs))
        for inputs in (loss_inputs(N, V) for N, V in itertools.product(sizes, vocabularies))
    )


def in_one_dtype(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """The definition in the inputs' dtype throughout, as `in_float64`."""
    logits = softcap * torch.tanh(x @ weight.T / softcap)
    losses = -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return (losses * scale.to(losses.dtype)).sum(), losses


def loss_bf16_errors(N: int, V: int) -> tuple[list[float], list[float]]:
    """Relative errors (2-norm) of losses, dx and dW in bf16: ours, and bf16's own."""
    x, weight, targets, scale = loss_inputs(N, V)
    low = (x.bfloat16(), weight.bfloat16(), targets, scale)
    exact = loss_with_gradients(in_one_dtype, (low[0].double(), low[1].double(), targets, scale.double()))
    found = [loss_with_gradients(path, low) for path in (cross_entropy, in_one_dtype)]
    ours, own = ([((a.double() - e).norm() / e.norm()).item() for a, e in zip(f, exact, strict=True)] for f in found)
    return ours, own


def test_cross_entropy_is_its_plain_twin_in_fp32(eager: None, law: Law) -> None:
    worst = loss_deviation(cross_entropy)
    law("chunked cross-entropy = plain twin, losses and gradients", worst, f"≤ {FP32_BAR:g} relative, fp32")
    assert worst <= FP32_BAR


@pytest.mark.timeout(900)  # a minute of compiling where nothing is cached, more where others compute too
def test_compiled_cross_entropy_is_its_plain_twin_in_fp32(law: Law) -> None:
    """The path that trains by default; one shape, since each compiles for many seconds."""
    with torch.compiler.set_stance("default"):
        worst = loss_deviation(cross_entropy, (CHUNK_TOKENS,), (1001,))
    law("compiled cross-entropy = plain twin, losses and gradients", worst, f"≤ {FP32_BAR:g} relative, fp32")
    assert worst <= FP32_BAR


def test_cross_entropy_in_bf16_is_as_good_as_bf16(eager: None, law: Law) -> None:
    """Root mean squares over shapes: of a handful of targets, one rounding can make the whole error."""
    shapes = itertools.product((7, 8, 30, 1000, CHUNK_TOKENS + 300), (37, 1001))
    ours, own = (torch.tensor(errors) for errors in zip(*(loss_bf16_errors(*shape) for shape in shapes), strict=True))
    ratio = (ours.square().mean(0) / own.square().mean(0)).sqrt().max().item()
    law("chunked cross-entropy in bf16: its error over bf16's own", ratio, f"≤ {BF16_BAR:g}")
    assert ratio <= BF16_BAR
    assert ours.max() <= 2 * 2**-8  # two units in the last place, whatever bf16's own error is


def broken_loss(mistake: str) -> LossPath:
    def path(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
        if mistake == "last chunk dropped":
            kept = len(x) // CHUNK_TOKENS * CHUNK_TOKENS
            total, losses = cross_entropy(x[:kept], weight, targets[:kept], scale[:kept], softcap)
            return total, torch.cat([losses, cross_entropy_plain(x, weight, targets, softcap)[kept:].detach()])
        if mistake == "mask forgotten":
            return cross_entropy(x, weight, targets, torch.full_like(scale, 1 / len(x)), softcap)
        if mistake == "no softcap":
            return plain(x, weight, targets, scale, 1e4)
        # the mean of each chunk, then the mean of those: a short last chunk counts too much
        chunks = [slice(at, at + CHUNK_TOKENS) for at in range(0, len(x), CHUNK_TOKENS)]
        totals, losses = zip(
            *(cross_entropy(x[c], weight, targets[c], scale[c] * len(x) / len(x[c]), softcap) for c in chunks),
            strict=True,
        )
        return torch.stack(totals).mean(), torch.cat(losses)

    return path


@pytest.mark.parametrize("mistake", ["last chunk dropped", "mask forgotten", "no softcap", "mean of means"])
def test_the_cross_entropy_check_can_fail(mistake: str, eager: None) -> None:
    assert loss_deviation(broken_loss(mistake), (CHUNK_TOKENS + 300,), (37,)) > 10 * FP32_BAR


def test_the_cross_entropy_check_catches_a_poor_exponential(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five terms of the series instead of eight, which no eye would see in a loss curve."""
    series = module._polynomial
    monkeypatch.setattr(module, "_polynomial", lambda x, c: series(x, c[-5:] if len(c) == 8 else c))
    assert loss_deviation(cross_entropy, (7,), (37,)) > 2 * FP32_BAR
