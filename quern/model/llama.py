"""The `llama` architecture, single-device: exactly what Hugging Face calls Llama, so that weights go both ways.

Pre-norm blocks with a learnable RMSNorm, rotary positions, grouped queries and SwiGLU; no biases, an untied head, no
softcap (Llama 2, arXiv 2307.09288). Gate and up projection are one parameter, gate first. Dropout, if any, falls on the
embedding and on what each block adds. `interop/llama_format.py` maps the names of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quern.kernels.rope import rotary_angles, rotate
from quern.kernels.softcap import NoCap
from quern.model.base import LanguageModel
from quern.model.context import Context, Window
from quern.model.gpt import CausalSelfAttention
from quern.model.layers import Draw, Embedding, Merged, Rotary
from quern.recipe import ResolvedModel

NORM_EPS = 1e-5
INIT_STD = 0.02


class RMSNorm(nn.Module):
    """Divides by the root mean square, computed in fp32, then scales in the input's dtype (arXiv 1910.07467)."""

    optimizer_groups: ClassVar = {"weight": "norms"}

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def init_parameters(self, draw: Draw) -> None:
        draw.fill(self.weight, 1.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x_BTD.float(), (x_BTD.size(-1),), eps=self.eps).to(x_BTD.dtype)


class LlamaAttention(CausalSelfAttention):
    """The projections and heads of `gpt`, without norms, gates and value embeddings."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, *, layer: int, out_std: float) -> None:
        """out_std: standard deviation of the initial weights that write to the residual stream."""
        super().__init__(width, heads, kv_heads, head_dim, layer=layer, gated=False)
        self.out_std = out_std

    def init_parameters(self, draw: Draw) -> None:
        for linear in (self.query, self.key, self.value):
            draw.normal(linear.weight, INIT_STD)
        draw.normal(self.out.weight, self.out_std)

    def forward(self, x_BTD: Tensor, rotary: Rotary, window: Window, context: Context) -> Tensor:
        """x: (B, T, D), normed → (B, T, D)."""
        return super().forward(x_BTD, None, rotary, window, context)

    def rotate(self, x_BTHE: Tensor, rotary: Rotary) -> Tensor:
        cos, sin = rotary
        return rotate(x_BTHE, cos, -sin)  # counter-clockwise, as Llama has it


class SwiGLU(Merged):
    """down(silu(gate x) ∘ up x), gate and up in one product (arXiv 2002.05202); it runs on some of the channels too."""

    stacked = "gate_up"

    def __init__(self, width: int, mlp_width: int, out_std: float) -> None:
        """out_std: standard deviation of the initial weights that write to the residual stream."""
        super().__init__()
        self.out_std = out_std
        self.gate_up = nn.Parameter(torch.empty(2, mlp_width, width))
        self.down = nn.Linear(mlp_width, width, bias=False)

    def init_parameters(self, draw: Draw) -> None:
        draw.normal(self.gate_up, INIT_STD)
        draw.normal(self.down.weight, self.out_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.project(x_BTD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, shape: ResolvedModel) -> None:
        super().__init__()
        eps = shape.norm_eps or NORM_EPS
        self.attention_norm = RMSNorm(shape.width, eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(shape.width, eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(shape.dropout or 0.0)

    def forward(self, x_BTD: Tensor, rotary: Rotary, window: Window, context: Context) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), rotary, window, context))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Llama(LanguageModel):
    """Tokens → normed hidden states; `logits` turns those into logits."""

    optimizer_groups: ClassVar[Mapping[str, str]] = {"embedding": "embedding", "head": "head"}
    default_groups: ClassVar = ("matrices", "embedding", "norms")

    def __init__(self, shape: ResolvedModel) -> None:
        """shape: resolved (`resolve`). Weights are uninitialised until `initialize`."""
        super().__init__()
        self.shape = shape
        self.cap = NoCap()
        self.windows = shape.window_sizes()
        self.attention_layers = list(range(shape.depth))
        self.embedding = Embedding(shape.vocab_size, shape.width)
        self.dropout = nn.Dropout(shape.dropout or 0.0)
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(shape.depth))
        self.norm = RMSNorm(shape.width, shape.norm_eps or NORM_EPS)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def make_block(self, layer: int) -> nn.Module:
        """The block of a layer; it is called as `LlamaBlock.forward`."""
        return LlamaBlock(self.make_attention(layer), self.make_mlp(layer), self.shape)

    def make_attention(self, layer: int) -> nn.Module:
        """The attention of a layer; it is called as `LlamaAttention.forward`."""
        shape = self.shape
        std = INIT_STD / math.sqrt(2 * shape.depth)  # 2 · depth layers write to the stream (GPT-2)
        return LlamaAttention(shape.width, shape.heads, shape.kv_heads, shape.head_dim, layer=layer, out_std=std)

    def make_mlp(self, layer: int) -> nn.Module:
        """The feed-forward of a layer: (B, T, D) → (B, T, D)."""
        return SwiGLU(self.shape.width, mlp_width(self.shape), INIT_STD / math.sqrt(2 * self.shape.depth))

    def forward(self, tokens_BT: Tensor, context: Context) -> Tensor:
        """tokens: (B, T) integers → (B, T, D) normed hidden states in the parameters' dtype."""
        x_BTD = self.dropout(self.embedding(tokens_BT))
        exponents = torch.arange(0, self.shape.head_dim, 2, device=x_BTD.device) / self.shape.head_dim
        rotary = rotary_angles(context.positions(x_BTD), 1.0 / self.shape.rope_base**exponents)
        for block, window in zip(self.blocks, context.windows(self.windows), strict=True):
            x_BTD = block(x_BTD, rotary, window, context)
        return self.norm(x_BTD)

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.norm.compile(**options)

    def init_parameters(self, draw: Draw) -> None:
        draw.normal(self.embedding.weight, INIT_STD)
        draw.normal(self.head.weight, INIT_STD)


def mlp_width(shape: ResolvedModel) -> int:
    """The width of gate and of up: 8/3 of the stream's (as many parameters as a plain feed-forward of 4), in 64s."""
    return shape.mlp_width or -(-8 * shape.width // (3 * 64)) * 64
