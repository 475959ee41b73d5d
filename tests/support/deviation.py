"""Random tensors, and how far two results lie apart, as the laws of kernels state it."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The result of a function of tensors, in their dtype, and the inputs' gradients for that of the result."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    assert y.dtype == leaves[0].dtype
    y.backward(grad.to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]
