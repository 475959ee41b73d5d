"""Law: rotary positions in Triton, alone and with the norm, equal their plain twins, forward and backward; the check
catches broken kernels. Runs in Triton's interpreter, fp32: the largest difference relative to the largest entry."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quern.kernels.rope import rotate_operator, rotate_plain
from tests.laws.table import Law
from tests.support.deviation import deviation
from tests.support.interpreter import Interpreted
from tests.support.mutant import with_mistake

TRITON = "quern.kernels.rope_triton"
FP32_BAR = 1e-5
GAIN = 1.2
LENGTHS = (1, 17, 129)
HEADS = ((3, 32), (1, 48), (2, 128))  # number and dim; half of 48 is no power of two

Path = Callable[[Tensor, Tensor, Tensor], Tensor]


def bound(path: Callable[..., Tensor], *more: Any) -> Path:
    return lambda x, cos, sin: path(x, cos, sin, *more)


PAIRS: dict[str, tuple[Path, Path]] = {
    name: (bound(rotate_operator, gain, False), bound(rotate_plain, gain))
    for name, gain in (("", None), ("with QK norm", GAIN))
}


def cases(lengths: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """x, cosines, sines and a gradient of y: the tables full or half-truncated, of one row of tokens or of each; x a
    tensor of its own or a slice of a merged projection, the gradient laid out in another order."""
    for (T, (H, E)), (number, B) in itertools.product(itertools.product(lengths, HEADS), enumerate((1, 2))):
        generator = torch.Generator().manual_seed(T + E)
        angles = 3 * torch.randn(B, T, 1, E // 2, generator=generator)
        angles[..., E // 4 if number else E :] = 0  # the second half of the pairs stands still
        x = 2 * torch.randn(2, T, 3, H, E, generator=generator)
        x = x[:, :, 0].contiguous() if number else x.unbind(2)[1]
        yield x, angles.cos(), angles.sin(), torch.randn(2, H, T, E, generator=generator).transpose(1, 2)


def with_gradient(path: Path, x: Tensor, cos: Tensor, sin: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()  # keeps its strides
    y = path(x, cos, sin)
    y.backward(grad)
    assert x.grad is not None
    return [y.detach(), x.grad]


def rope_deviation(name: str, lengths: tuple[int, ...] = LENGTHS) -> float:
    return max(deviation(*(with_gradient(path, *case) for path in PAIRS[name])) for case in cases(lengths))


@pytest.mark.parametrize("name", PAIRS)
def test_triton_rope_is_its_plain_twin(name: str, interpreted: Interpreted, law: Law) -> None:
    worst = interpreted(rope_deviation, name)
    law(f"Triton RoPE {name}".strip() + " = plain twin, y and gradient", worst, FP32_BAR, "relative, fp32")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("-1.0 if back else 1.0", "1.0"),  # the gradient turns on instead of back
        ("0 if cos.size(0) == 1 else", "0 *"),  # the first row's positions for all
    ],
)
def test_the_check_can_fail(right: str, wrong: str, interpreted: Interpreted) -> None:
    assert interpreted(with_mistake, TRITON, right, wrong, rope_deviation, "", (17,)) > 10 * FP32_BAR


def check_operators() -> None:
    x, cos, sin, _ = next(cases((5,)))
    x = x.detach().requires_grad_()
    torch.library.opcheck(torch.ops.quern.rotate, (x, cos, sin, None, False))
    torch.library.opcheck(torch.ops.quern.rotate, (x, cos, sin, GAIN, False))


def test_the_operators_say_what_they_do(interpreted: Interpreted) -> None:
    """Their fake implementations, their gradients, how they are traced: torch's own checks."""
    interpreted(check_operators)
