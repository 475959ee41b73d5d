"""Law: the chunked loss equals its plain twin, forward and backward, under every cap; broken Triton kernels are seen.

fp32: the largest difference, relative to the largest entry. bf16: the error against float64, as a multiple of the
error that the same formula makes when each of its operations is rounded to bf16.
"""

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quern import compiler
from quern.kernels.cross_entropy import CHUNK_TOKENS, TRITON, cross_entropy, cross_entropy_plain
from quern.kernels.softcap import Cap, NoCap, SigmoidCap, TanhCap
from tests.laws.table import Law
from tests.support.deviation import deviation
from tests.support.interpreter import Interpreted
from tests.support.mutant import with_mistake

FP32_BAR = 1e-5
BF16_BAR = 1.1
CAPS = {"tanh": TanhCap(15.0), "sigmoid": SigmoidCap(30.0, 5.0), "no": NoCap()}
by_cap = pytest.mark.parametrize("cap", CAPS)

LossPath = Callable[[Tensor, Tensor, Tensor, Tensor, Cap], tuple[Tensor, Tensor]]
SIZES = (1, 7, 1000, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 300)


def plain(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, cap: Cap) -> tuple[Tensor, Tensor]:
    losses = cross_entropy_plain(x, weight, targets, cap)
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


def loss_with_gradients(path: LossPath, inputs: tuple[Tensor, Tensor, Tensor, Tensor], cap: Cap) -> list[Tensor]:
    """Losses, and the gradients of x and of the head's weight."""
    x, weight = (part.detach().clone().requires_grad_() for part in inputs[:2])
    total, losses = path(x, weight, *inputs[2:], cap)
    total.backward()
    assert x.grad is not None and weight.grad is not None
    return [losses.detach(), x.grad, weight.grad]


def loss_deviation(
    path: LossPath, cap: str, sizes: tuple[int, ...] = SIZES, vocabularies: tuple[int, ...] = (37, 1001)
) -> float:
    return max(
        deviation(loss_with_gradients(path, inputs, CAPS[cap]), loss_with_gradients(plain, inputs, CAPS[cap]))
        for inputs in (loss_inputs(N, V) for N, V in itertools.product(sizes, vocabularies))
    )


def in_one_dtype(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, cap: Cap) -> tuple[Tensor, Tensor]:
    """The definition in the inputs' dtype throughout, as `in_float64`."""
    losses = torch.nn.functional.cross_entropy(cap(x @ weight.T), targets, reduction="none")
    return (losses * scale.to(losses.dtype)).sum(), losses


def loss_bf16_errors(N: int, V: int, cap: Cap) -> tuple[list[float], list[float]]:
    """Relative errors (2-norm) of losses, dx and dW in bf16: ours, and bf16's own."""
    x, weight, targets, scale = loss_inputs(N, V)
    low = (x.bfloat16(), weight.bfloat16(), targets, scale)
    exact = loss_with_gradients(in_one_dtype, (low[0].double(), low[1].double(), targets, scale.double()), cap)
    found = [loss_with_gradients(path, low, cap) for path in (cross_entropy, in_one_dtype)]
    ours, own = ([((a.double() - e).norm() / e.norm()).item() for a, e in zip(f, exact, strict=True)] for f in found)
    return ours, own


@by_cap
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.timeout(900))])
def test_cross_entropy_is_its_plain_twin_in_fp32(cap: str, compiled: bool, law: Law) -> None:
    """Compiled, as it trains by default, for one shape alone: each compiles for many seconds, minutes where others
    compute too."""
    assert not compiled or compiler.problem("cpu") is None  # it sets what to compile with
    shapes = [(CHUNK_TOKENS,), (1001,)] if compiled else []
    with nullcontext() if compiled else compiler.eager():
        worst = loss_deviation(cross_entropy, cap, *shapes)
    name = f"{'compiled' if compiled else 'chunked'} cross-entropy, {cap} softcap = plain twin, losses and gradients"
    law(name, worst, FP32_BAR, "relative, fp32")


@by_cap
def test_cross_entropy_in_bf16_is_as_good_as_bf16(cap: str, eager: None, law: Law) -> None:
    """Takes root mean squares over shapes: with a handful of targets, one rounding can make the whole error."""
    shapes = itertools.product((7, 8, 30, 1000, CHUNK_TOKENS + 300), (37, 1001))
    errors = [loss_bf16_errors(*shape, CAPS[cap]) for shape in shapes]
    ours, own = (torch.tensor(part) for part in zip(*errors, strict=True))
    ratio = (ours.square().mean(0) / own.square().mean(0)).sqrt().max().item()
    law(f"chunked cross-entropy, {cap} softcap in bf16: its error over bf16's own", ratio, BF16_BAR)
    if CAPS[cap].tanh_form is not None:  # without a cap the rounding of a large logit alone is more than that
        assert ours.max() <= 2 * 2**-8  # two units in the last place, whatever bf16's own error is


# Triton, in its interpreter -----------------------------------------------------------------------------------

SMALL_CHUNKS = replace(TRITON, chunk_tokens=64)
TRITON_SHAPES = ((1, 37), (17, 1), (17, 5000), (127, 37), (129, 37))  # a row: less than a block, or more


def by_triton(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, cap: Cap) -> tuple[Tensor, Tensor]:
    return cross_entropy(x, weight, targets, scale, cap, path=SMALL_CHUNKS)


def triton_deviation(cap: str, shapes: tuple[tuple[int, int], ...]) -> float:
    """The largest deviation of losses and gradients, and of losses computed without gradients."""
    worst = max(loss_deviation(by_triton, cap, (N,), (V,)) for N, V in shapes)
    inputs = loss_inputs(17, 5000)
    with torch.no_grad():
        found, expected = (path(*inputs, CAPS[cap])[1] for path in (by_triton, plain))
    return max(worst, deviation([found], [expected]))


@by_cap
def test_triton_cross_entropy_is_its_plain_twin_in_fp32(cap: str, interpreted: Interpreted, law: Law) -> None:
    worst = interpreted(triton_deviation, cap, TRITON_SHAPES)
    name = f"Triton cross-entropy, {cap} softcap = plain twin, losses and gradients"
    law(name, worst, FP32_BAR, "relative, fp32")


@pytest.mark.parametrize(
    ("cap", "right", "wrong"),
    [
        ("tanh", "total += tl.where(at < V, e, 0.0)", "total += e"),  # what lies past the row is counted
        ("no", "total * tl.exp(peak - shift) +", "total +"),  # the sum is not rescaled to a new maximum
    ],
)
def test_the_triton_check_can_fail(cap: str, right: str, wrong: str, interpreted: Interpreted) -> None:
    kernel = "quern.kernels.cross_entropy_triton"
    assert interpreted(with_mistake, kernel, right, wrong, triton_deviation, cap, ((17, 37),)) > 10 * FP32_BAR


def traced_deviation() -> float:
    """The whole loss traced by the compiler, the operator as one node of its graph; against the same untraced."""
    path, inputs = torch.compile(by_triton, backend="aot_eager", fullgraph=True), loss_inputs(70, 37)
    with warnings.catch_warnings():  # torch 2.13 does so itself when it traces an autograd function
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        return deviation(*(loss_with_gradients(one, inputs, CAPS["tanh"]) for one in (path, by_triton)))


def test_the_compiler_passes_through_the_triton_loss(interpreted: Interpreted) -> None:
    assert interpreted(traced_deviation) <= 1e-6


def check_operator() -> None:
    x, weight, targets, scale = loss_inputs(5, 37)
    for height in (None, 15.0):
        torch.library.opcheck(torch.ops.quern.cross_entropy, (x @ weight.T, targets, scale, height, 15.0, True))


def test_the_operator_says_what_it_does(interpreted: Interpreted) -> None:
    """Its fake implementation, what it overwrites, how it is traced: torch's own checks."""
    interpreted(check_operator)
