"""Law: the product that computes one triangle equals the whole one, forward and backward, and is exactly symmetric; the
check catches broken kernels. Runs in Triton's interpreter, fp32: the largest difference relative to the largest entry.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quern.kernels.symmetric import symmetric_product_operator, symmetric_product_plain
from tests.laws.table import Law
from tests.support.deviation import deviation
from tests.support.interpreter import Interpreted
from tests.support.mutant import planted

FP32_BAR = 1e-5
SHAPES = ((1, 1), (1, 33), (17, 1000), (17, 1), (127, 33), (127, 1), (129, 33), (129, 70))


def cases(shapes: tuple[tuple[int, int], ...]) -> Iterator[tuple[Tensor, Tensor | None, float, float, Tensor]]:
    """x, a, beta, alpha and a gradient: with and without a; x as it lies, or transposed, as of tall matrices."""
    for number, (R, C) in enumerate(shapes):
        generator = torch.Generator().manual_seed(R + C)
        x = torch.randn(2, R, C, generator=generator)
        a = torch.randn(2, R, R, generator=generator)
        if number % 2:
            x = torch.randn(2, C, R, generator=generator).mT
        grad = torch.randn(2, R, R, generator=generator)
        yield (x, a + a.mT, -2.5, 0.5, grad) if number % 3 else (x, None, 0.0, 1.5, grad)


def with_gradients(path: Callable[..., Tensor], x: Tensor, a: Tensor | None, beta: float, alpha: float, grad: Tensor):
    inputs = [one.detach().requires_grad_() for one in (x, a) if one is not None]
    y = path(*(inputs if len(inputs) == 2 else (*inputs, None)), beta, alpha)
    y.backward(grad)
    return [y.detach(), *(one.grad for one in inputs)]


def product_deviation(shapes: tuple[tuple[int, int], ...] = SHAPES) -> float:
    """Infinite where the result is not symmetric in every bit."""
    worst = 0.0
    for case in cases(shapes):
        ours, expected = (with_gradients(path, *case) for path in (symmetric_product_operator, symmetric_product_plain))
        if not torch.equal(ours[0], ours[0].mT):
            return float("inf")
        worst = max(worst, deviation(ours, expected))
    return worst


def test_the_symmetric_product_is_its_plain_twin(interpreted: Interpreted, law: Law) -> None:
    worst = interpreted(product_deviation)
    law("Triton symmetric product = plain twin, result and gradients", worst, f"≤ {FP32_BAR:g} relative, fp32")
    assert worst <= FP32_BAR


def mutant_deviation(right: str, wrong: str) -> float:
    with planted("quern.kernels.symmetric_triton", right, wrong):
        return product_deviation(((127, 33), (127, 1)))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tl.trans(total), j * BLOCK", "total, j * BLOCK"),  # mirrored, but not turned
        ("range(0, C, BLOCK_K)", "range(0, C - BLOCK_K, BLOCK_K)"),
    ],
)
def test_the_check_can_fail(right: str, wrong: str, interpreted: Interpreted) -> None:
    assert interpreted(mutant_deviation, right, wrong) > 10 * FP32_BAR


def check_operator() -> None:
    x, a, beta, alpha, _ = list(cases(((17, 5), (17, 5))))[1]
    torch.library.opcheck(torch.ops.quern.symmetric_product, (x.requires_grad_(), a, beta, alpha))


def test_the_operator_says_what_it_does(interpreted: Interpreted) -> None:
    """Its fake implementation, its gradient, how it is traced: torch's own checks."""
    interpreted(check_operator)
