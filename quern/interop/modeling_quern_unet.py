"""The language model `unet` of quern in plain PyTorch for the library transformers: the speedrun model of
modded-nanogpt (github.com/KellerJordan/modded-nanogpt, May 2025).

This file needs torch and transformers only. Parameters have the names that they have in quern.

Shapes: B rows, N new tokens, D width, H heads, E head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_quern import (
    QuernForCausalLM,
    QuernUNetConfig,
    SquaredReluMLP,
    Text,
    half_frequencies,
    norm,
    rotary_table,
    rotate,
)

ATTENTION_SCALE = 0.12
"""The factor of the products of queries and keys."""
VALUE_EMBEDDINGS = 3
"""The most value embeddings: for the first layers, and again for the last."""


class UNetAttention(nn.Module):
    """Causal self-attention: merged projections, QK norm, positions on half of each head, value embeddings."""

    def __init__(self, config: QuernUNetConfig, layer: int, mixed: bool) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.windows[layer]
        self.qkv = nn.Parameter(torch.zeros(3, inner, width))
        self.out = nn.Linear(inner, width, bias=False)
        self.value_scales = nn.Parameter(torch.full((2 if mixed else 1,), 0.5))

    def forward(self, x: Tensor, value: Tensor | None, rotary: tuple[Tensor, Tensor], text: Text) -> Tensor:
        """x: (B, N, D), normed; value: (B, N, H·E), the value embedding, or None → (B, N, D)."""
        merged = F.linear(x, self.qkv.flatten(0, 1)).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = merged.unbind(2)
        v = self.value_scales[0] * v
        if value is not None:
            v = v + self.value_scales[1] * value.view_as(v)
        q, k = norm(rotate(q, rotary)), norm(rotate(k, rotary))
        return self.out(text.attend(self.layer, q, k, v, self.window, ATTENTION_SCALE))


class UNetBlock(nn.Module):
    """The residual stream mixed with the embedding; then attention, unless this layer has none, and feed-forward."""

    def __init__(self, config: QuernUNetConfig, attention: UNetAttention | None) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = SquaredReluMLP(config.hidden_size)
        self.residual_scales = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, x0: Tensor, value: Tensor | None, rotary: tuple[Tensor, Tensor], text: Text) -> Tensor:
        x = self.residual_scales[0] * x + self.residual_scales[1] * x0
        if self.attention is not None:
            x = x + self.attention(norm(x), value, rotary, text)
        return x + self.mlp(norm(x))


class QuernUNetForCausalLM(QuernForCausalLM):
    """`unet`: skips from the first half of the layers to the second, one layer without attention, sigmoid softcap.

    Documents, each from its BOS on, do not see each other.
    """

    config_class = QuernUNetConfig
    _no_split_modules = ["UNetBlock"]

    def __init__(self, config: QuernUNetConfig) -> None:
        super().__init__(config)
        depth, V = config.num_hidden_layers, config.vocab_size
        inner, count = config.num_attention_heads * config.head_dim, min(VALUE_EMBEDDINGS, depth // 2)
        self.value_of = [*range(count), *[None] * (depth - 2 * count), *range(count)]
        self.embedding = nn.Embedding(V, config.hidden_size)
        self.value_embeddings = nn.ModuleList(nn.Embedding(V, inner) for _ in range(count))
        self.blocks = nn.ModuleList(UNetBlock(config, self._attention(config, layer)) for layer in range(depth))
        self.head = nn.Linear(config.hidden_size, V, bias=False)
        self.skip_scales = nn.Parameter(torch.ones(depth // 2))
        self.post_init()

    def _attention(self, config: QuernUNetConfig, layer: int) -> UNetAttention | None:
        if layer == config.num_hidden_layers * 7 // 12:
            return None
        return UNetAttention(config, layer, self.value_of[layer] is not None)

    def hidden_states(self, text: Text) -> Tensor:
        new_ids, half = text.input_ids[:, -text.new :], len(self.skip_scales)
        rotary = rotary_table(
            text.positions(), half_frequencies(self.config.head_dim, self.config.rope_base, new_ids.device)
        )
        values = [table(new_ids) for table in self.value_embeddings]
        x0 = x = norm(self.embedding(new_ids))
        skips: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if layer >= half:
                x = x + self.skip_scales[layer - half] * skips.pop()
            which = self.value_of[layer]
            x = block(x, x0, None if which is None else values[which], rotary, text)
            if layer < half:
                skips.append(x)
        return norm(x)

    def cap(self, logits: Tensor) -> Tensor:
        top, divisor = 2 * self.config.softcap, self.config.softcap / 2 * self.config.hidden_size**0.5
        return top * torch.sigmoid(logits / divisor)

    def document_start(self) -> int | None:
        return self.config.bos_token_id
