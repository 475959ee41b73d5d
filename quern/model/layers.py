"""The small pieces of every model: norm, rotary positions, embedding, feed-forward, merged projections, and the draw of
initial values.

Shapes: B batch, T tokens, D width, H heads, E head dim. Pure functions and single-device modules.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.compiler import in_eager_inference
from quern.kernels.rope import rotary_angles

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles, (1 or B, T, 1, E / 2) each."""


class Draw:
    """Sets the initial values of a model's parameters, each from a generator seeded by (seed, name): a parameter that
    an idea adds leaves the values of all others unchanged."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._names = {p: name for name, p in model.named_parameters()}
        self.filled: set[str] = set()

    def uniform(self, p: Tensor, low: float, high: float) -> None:
        """Uniform on [low, high)."""
        self.fill(p, torch.empty(p.shape, dtype=torch.float32, device="cpu").uniform_(low, high, generator=self._of(p)))

    def normal(self, p: Tensor, std: float) -> None:
        """Normal with mean 0 and standard deviation `std`."""
        self.fill(p, torch.empty(p.shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=self._of(p)))

    def fill(self, p: Tensor, value: float | Tensor) -> None:
        """A constant, or given values."""
        p.copy_(torch.as_tensor(value).expand(p.shape))
        self.filled.add(self._names[cast(nn.Parameter, p)])

    def _of(self, p: Tensor) -> torch.Generator:
        name = self._names[cast(nn.Parameter, p)]
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))  # a CPU generator reads 32 bits


def norm(x: Tensor) -> Tensor:
    """RMSNorm without parameters over the last dim (arXiv 1910.07467); computed in fp32, returned in x's dtype."""
    return F.rms_norm(x.float(), (x.size(-1),), eps=1e-6).to(x.dtype)


def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `rotary_angles` at the frequencies base^(-2i / head_dim), for (1 or B, T) positions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    return rotary_angles(positions, base**-exponents)


def half_rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `rotary_angles`: the first half of the pairs turn, by 1 to 1/base radians per token."""
    pairs, turning = torch.arange(head_dim // 2, dtype=torch.float32, device=positions.device), head_dim // 4
    # Code compiled for a CPU would compute a padded tensor number by number, again in every layer.
    frequencies = torch.where(pairs < turning, base ** -(pairs / max(1, turning - 1)), 0.0)
    return rotary_angles(positions, frequencies)


def embed(tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
    """Returns rows of the weight: (B, T) integers → (B, T, D).

    On a CPU the backward pass is the library's scatter, as a custom operator: the compiler turns it into atomic
    additions per element, which are several times slower. The gradients of a token that occurs often are summed in
    fp32, whatever dtype they have.
    """
    one_token = tokens_BT.size(-1) == 1 and not torch.is_grad_enabled()  # the call would cost more than the rows
    if weight_VD.device.type != "cpu" or one_token or in_eager_inference():
        return F.embedding(tokens_BT, weight_VD)
    return _embed(tokens_BT, weight_VD)


@torch.library.custom_op("quern::embed", mutates_args=())
def _embed(tokens: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


@_embed.register_fake
def _(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.size(1))


@torch.library.custom_op("quern::embed_backward", mutates_args=())
def _embed_backward(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    if grad.dtype == torch.float32:
        return torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False)
    # In bf16 the library's sum of 256 equal gradients stops growing; this sums in fp32, for the rows that occur.
    used, places = torch.unique(tokens, return_inverse=True)
    sums = torch.zeros(len(used), grad.size(-1), device=grad.device)
    sums.index_add_(0, places.flatten(), grad.flatten(0, -2).float())
    whole = grad.new_zeros(rows, grad.size(-1))
    whole[used] = sums.to(grad.dtype)
    return whole


@_embed_backward.register_fake
def _(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    return grad.new_empty(rows, grad.size(-1))


def _save_tokens(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.save_for_backward(tokens)
    ctx.rows = weight.size(0)


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    (tokens,) = ctx.saved_tensors
    return None, _embed_backward(grad.contiguous(), tokens, ctx.rows)


_embed.register_autograd(_embedding_backward, setup_context=_save_tokens)


class Embedding(nn.Embedding):
    """tokens (B, T) → rows of its weight (B, T, D)."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # there a draw of normal numbers has no effect, and imports PyTorch's compiler
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return embed(input, self.weight)


class SquaredReluMLP(nn.Module):
    """D → 4D → D with ReLU² in between (arXiv 2109.08668). up_share: share of 1/sqrt(width), for the first matrix."""

    def __init__(self, width: int, up_share: float) -> None:
        super().__init__()
        self.up_share = up_share
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def init_parameters(self, draw: Draw) -> None:
        bound = self.up_share * math.sqrt(3.0 / self.up.in_features)
        draw.uniform(self.up.weight, -bound, bound)
        draw.fill(self.down.weight, 0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BTD)).square())


class Merged(nn.Module):
    """Several projections of one input as one product: one parameter holds their stacked matrices. fp8.py changes how
    linear layers multiply, and finds these products by this class, since no nn.Linear computes them.

    multiply: (x (…, D), weight (O, D)) → x Wᵀ (…, O). A replacement of F.linear must compute the same product."""

    stacked: ClassVar[str]
    """The name of the parameter: (matrices, outputs of each, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply: Callable[[Tensor, Tensor], Tensor] = F.linear

    def stacked_weight(self) -> nn.Parameter:
        return self.get_parameter(self.stacked)

    def project(self, x: Tensor) -> Tensor:
        """x: (…, D) → (…, matrices · outputs of each), the outputs of each matrix in order."""
        return self.multiply(x, self.stacked_weight().flatten(0, 1))
