"""The `unet` architecture: the speedrun transformer of modded-nanogpt (May 2025), single-device.

Merged query, key and value, rotary positions on half of each head, QK norm, a fixed attention scale, value embeddings
in the outer layers, one layer without attention, ReLU², skips from the first half of the layers to the second, the
embedding mixed into every block, sigmoid softcap; documents that share a row do not see each other, and windows grow
in training, in whole blocks.

Source: github.com/KellerJordan/modded-nanogpt. It is fixed at 12 layers, 768 wide; here every number follows from the
shape. Its windows are counted in blocks of 128 around a block of queries, ours in tokens before each query.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from quern.kernels.rope import rotate
from quern.kernels.softcap import SigmoidCap
from quern.model.base import LanguageModel
from quern.model.context import CausalContext, Context, Window
from quern.model.layers import Draw, Embedding, Merged, Rotary, SquaredReluMLP, half_rotary_table, norm
from quern.recipe import ResolvedModel

ATTENTION_SCALE = 0.12
"""Multiplies products of normed queries and keys, whatever the head dim."""
UNIFORM_SHARE = 0.5
"""Matrices that are not zero start with this share of the standard deviation 1/sqrt(inputs)."""
VALUE_EMBEDDINGS = 3
HEAD_MULTIPLE = 128
"""The head's rows are filled up to a multiple: fast kernels want it. No target is ever one of these."""


def without_attention(depth: int) -> int:
    """The layer that does not attend: 7 of 12, and the same share of any depth."""
    return depth * 7 // 12


def value_embedding_of(layer: int, depth: int) -> int | None:
    """Index of the value embedding of a layer: 0, 1, 2 in the first three layers and again in the last three."""
    count = min(VALUE_EMBEDDINGS, depth // 2)
    if layer < count:
        return layer
    return layer - (depth - count) if layer >= depth - count else None


class MergedAttention(Merged):
    """Causal self-attention; reads its number of heads off its weights, so that the same code runs on some of them."""

    stacked = "qkv"
    optimizer_groups: ClassVar = {"value_scales": "scales"}

    def __init__(self, width: int, heads: int, head_dim: int, *, layer: int, has_value_embedding: bool) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim
        self.qkv = nn.Parameter(torch.empty(3, heads * head_dim, width))
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.value_scales = nn.Parameter(torch.empty(2 if has_value_embedding else 1))

    def init_parameters(self, draw: Draw) -> None:
        bound = UNIFORM_SHARE * math.sqrt(3.0 / self.qkv.size(-1))
        draw.uniform(self.qkv, -bound, bound)
        draw.fill(self.out.weight, 0.0)
        draw.fill(self.value_scales, 0.5)

    def forward(
        self, x_BTD: Tensor, value_embedding: Tensor | None, rotary: Rotary, window: Window, context: Context
    ) -> Tensor:
        """x: (B, T, D), normed; value_embedding: (B, T, H·E) or None → (B, T, D)."""
        B, T, _ = x_BTD.shape
        merged = self.project(x_BTD).view(B, T, 3, -1, self.head_dim)
        q_BTHE, k_BTHE, v_BTHE = merged.unbind(2)
        v_BTHE = self.value_scales[0] * v_BTHE
        if value_embedding is not None:
            v_BTHE = v_BTHE + self.value_scales[1] * value_embedding.view_as(v_BTHE)
        q_BTHE, k_BTHE = rotate(q_BTHE, *rotary, 1.0), rotate(k_BTHE, *rotary, 1.0)
        y_BTHE = context.attend(self.layer, q_BTHE, k_BTHE, v_BTHE, window, ATTENTION_SCALE)
        return self.out(y_BTHE.reshape(B, T, -1))


class UNetBlock(nn.Module):
    """The residual stream mixed with the embedding; then attention, unless this layer has none, and feed-forward."""

    def __init__(self, attention: nn.Module | None, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.residual_scales = nn.Parameter(torch.empty(2))

    def init_parameters(self, draw: Draw) -> None:
        draw.fill(self.residual_scales, torch.tensor([1.0, 0.0]))

    def forward(
        self,
        x_BTD: Tensor,
        x0_BTD: Tensor,
        value_embedding: Tensor | None,
        rotary: Rotary,
        window: Window,
        context: Context,
    ) -> Tensor:
        x_BTD = self.residual_scales[0] * x_BTD + self.residual_scales[1] * x0_BTD
        if self.attention is not None:
            x_BTD = x_BTD + self.attention(norm(x_BTD), value_embedding, rotary, window, context)
        return x_BTD + self.mlp(norm(x_BTD))


class UNet(LanguageModel):
    """Tokens → normed hidden states; `logits` turns those into softcapped logits."""

    optimizer_groups: ClassVar[Mapping[str, str]] = {"embedding": "embedding", "head": "head"}
    default_groups: ClassVar = ("matrices", "value_embeddings", "scales")
    compiled_parts: ClassVar = ("_enter", "_merge", "_leave")
    window_block: ClassVar[int] = 128
    """Windows are multiples of so many tokens."""
    long_window: ClassVar[int] = 1792
    """Tokens that an L layer sees once windows are grown, if the context is that long; an S layer sees half."""

    def __init__(self, shape: ResolvedModel) -> None:
        """shape: resolved (`resolve`). Weights are uninitialised until `initialize`.

        Raises ValueError for an odd depth, fewer key-value heads than heads, or a head dim that 4 does not divide.
        """
        super().__init__()
        _check(shape)
        self.shape = shape
        self.cap = SigmoidCap(2 * shape.softcap, shape.softcap / 2 * shape.width**0.5)
        self.windows: list[int | None] = [*self._grown(1.0)]
        self.attention_layers = [layer for layer in range(shape.depth) if layer != without_attention(shape.depth)]
        self.head_dim = shape.head_dim
        self.embedding = Embedding(shape.vocab_size, shape.width)
        self.value_embeddings = nn.ModuleList(
            Embedding(shape.vocab_size, shape.heads * shape.head_dim)
            for _ in range(min(VALUE_EMBEDDINGS, shape.depth // 2))
        )
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(shape.depth))
        rows = -(-shape.vocab_size // HEAD_MULTIPLE) * HEAD_MULTIPLE
        self.head = nn.Linear(shape.width, rows, bias=False)
        self.skip_scales = nn.Parameter(torch.empty(shape.depth // 2))

    def make_block(self, layer: int) -> nn.Module:
        """The block of a layer; it is called as `UNetBlock.forward`."""
        return UNetBlock(self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module | None:
        """The attention of a layer, called as `MergedAttention.forward`; None for the layer without attention."""
        shape = self.shape
        if layer == without_attention(shape.depth):
            return None
        mixed_in = value_embedding_of(layer, shape.depth) is not None
        return MergedAttention(shape.width, shape.heads, shape.head_dim, layer=layer, has_value_embedding=mixed_in)

    def make_mlp(self, layer: int) -> nn.Module:
        """The feed-forward of a layer: (B, T, D) → (B, T, D)."""
        return SquaredReluMLP(self.shape.width, UNIFORM_SHARE)

    def forward(self, tokens_BT: Tensor, context: Context) -> Tensor:
        """tokens: (B, T) integers → (B, T, D) normed hidden states in the parameters' dtype."""
        x_BTD = self._enter(tokens_BT)
        x0_BTD = x_BTD.view_as(x_BTD)  # an object of its own: the compiler would tell the first block apart otherwise
        rotary = half_rotary_table(context.positions(x_BTD), self.head_dim, self.shape.rope_base)
        values: list[Tensor] = []
        windows = context.windows(self.windows)
        depth, half = len(self.blocks), len(self.skip_scales)
        skips: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if layer >= half:
                x_BTD = self._merge(x_BTD, skips.pop(), self.skip_scales[layer - half])
            which = value_embedding_of(layer, depth)
            if which == len(values):  # made where it is used: the backward pass takes the newest nodes first
                values.append(self.value_embeddings[len(values)](tokens_BT))
            x_BTD = block(x_BTD, x0_BTD, None if which is None else values[which], rotary, windows[layer], context)
            if layer < half:
                skips.append(x_BTD.view_as(x_BTD))  # an object of its own, as above: the first skip skips nothing
        return self._leave(x_BTD)

    def _enter(self, tokens_BT: Tensor) -> Tensor:
        return norm(self.embedding(tokens_BT))

    def _merge(self, x_BTD: Tensor, skip_BTD: Tensor, scale: Tensor) -> Tensor:
        return x_BTD + scale * skip_BTD

    def _leave(self, x_BTD: Tensor) -> Tensor:
        return norm(x_BTD)

    def context(self, tokens_BT: Tensor, progress: float = 1.0) -> CausalContext:
        """Documents, each from its BOS on, do not see each other; windows grow with the progress of the run.

        Windows are tensors, so that a compiled model does not compile again when they grow. Raises ValueError where
        the shape does not name the BOS.
        """
        if self.shape.bos is None:
            raise ValueError("unet tells documents apart by their BOS: set model.bos to the tokenizer's")
        documents_BT = (tokens_BT == self.shape.bos).cumsum(1, dtype=torch.int32)
        now = self._grown(progress)
        tensors = {size: torch.tensor(size) for size in set(now)}
        return CausalContext(documents_BT, [tensors[size] for size in now], progress)

    def _grown(self, share: float) -> list[int]:
        """Each layer's window in tokens: it grows with the share of the run, block by block, from one block on.

        Half a block less than the whole is what the share is of, so that the last block comes just before the end.
        """
        blocks = -(-min(self.long_window, self.shape.context) // self.window_block)
        long = max(1, math.ceil(share * (blocks - 0.5)))
        sizes = {"L": long, "S": max(1, long // 2)}
        return [sizes[kind] * self.window_block for kind in self.shape.window_kinds()]

    def init_parameters(self, draw: Draw) -> None:
        """Initialises as the source: embeddings are normal, writes to the residual stream and the logits are zero."""
        for table in (self.embedding, *cast(list[nn.Embedding], list(self.value_embeddings))):
            draw.normal(table.weight, 1.0)
        draw.fill(self.head.weight, 0.0)
        draw.fill(self.skip_scales, 1.0)


def _check(shape: ResolvedModel) -> None:
    if shape.depth % 2:
        raise ValueError(f"unet pairs the layers of its two halves: depth must be even, not {shape.depth}")
    if shape.kv_heads != shape.heads:
        raise ValueError(f"unet merges queries, keys and values: leave out model.kv-heads ({shape.kv_heads})")
    if shape.head_dim % 4:
        raise ValueError(f"unet turns half of each head's pairs: model.head-dim must divide by 4, not {shape.head_dim}")
