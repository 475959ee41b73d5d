"""The language model `gpt` of quern in plain PyTorch for the library transformers: nanochat's transformer.

This file needs torch and transformers only. Parameters have the names that they have in quern.

Shapes: B rows, N new tokens, D width, K key and value heads, E head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_quern import (
    QuernForCausalLM,
    QuernGPTConfig,
    SquaredReluMLP,
    Text,
    half_frequencies,
    norm,
    rotary_table,
    rotate,
)

QK_SCALE = 1.2
"""Normed queries and keys are both scaled by this."""
GATE_CHANNELS, GATE_RANGE = 12, 3.0
"""Channels that the gate of the value embedding reads, and the gate's largest value."""
SMEAR_CHANNELS = 24
"""Channels that the gate of the smear reads."""
BIGRAM_FACTORS = (36_313, 27_191)
"""Factors of a token and of the one before it in the hash of a bigram."""


class GPTAttention(nn.Module):
    """Causal self-attention: grouped queries, QK norm, rotary positions, gated value embeddings (arXiv 2410.17897)."""

    def __init__(self, config: QuernGPTConfig, layer: int, gated: bool) -> None:
        super().__init__()
        width, E = config.hidden_size, config.head_dim
        self.layer, self.head_dim, self.window = layer, E, config.windows[layer]
        self.key_offset = config.key_offset and self.window is None
        self.query = nn.Linear(width, config.num_attention_heads * E, bias=False)
        self.key = nn.Linear(width, config.num_key_value_heads * E, bias=False)
        self.value = nn.Linear(width, config.num_key_value_heads * E, bias=False)
        self.out = nn.Linear(config.num_attention_heads * E, width, bias=False)
        self.value_gate = nn.Linear(GATE_CHANNELS, config.num_key_value_heads, bias=False) if gated else None

    def forward(self, x: Tensor, value: Tensor | None, rotary: tuple[Tensor, Tensor], text: Text) -> Tensor:
        """x: (B, N, D), normed; value: (B, N, K·E), the value embedding, or None → (B, N, D)."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.query, self.key, self.value))
        if self.value_gate is not None and value is not None:
            gate = GATE_RANGE * torch.sigmoid(self.value_gate(x[..., :GATE_CHANNELS]))
            v = v + gate[..., None] * value.view_as(v)
        q, k = norm(rotate(q, rotary)) * QK_SCALE, norm(rotate(k, rotary)) * QK_SCALE
        return self.out(text.attend(self.layer, q, k, v, self.window, None, self.key_offset))


class GPTBlock(nn.Module):
    """The residual stream mixed with its first state; then attention and feed-forward, each added to the stream."""

    def __init__(self, config: QuernGPTConfig, layer: int, gated: bool) -> None:
        super().__init__()
        self.attention = GPTAttention(config, layer, gated)
        self.mlp = SquaredReluMLP(config.hidden_size)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        scales: tuple[Tensor, Tensor],
        value: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        text: Text,
    ) -> Tensor:
        x = scales[0] * x + scales[1] * x0
        x = x + self.attention(norm(x), value, rotary, text)
        return x + self.mlp(norm(x))


class QuernGPTForCausalLM(QuernForCausalLM):
    """`gpt`: value embeddings on alternating layers, smear, backout, x0 scales, tanh softcap, sliding windows."""

    config_class = QuernGPTConfig
    _no_split_modules = ["GPTBlock"]

    def __init__(self, config: QuernGPTConfig) -> None:
        super().__init__(config)
        depth, width, V = config.num_hidden_layers, config.hidden_size, config.vocab_size
        gated = [layer % 2 == (depth - 1) % 2 for layer in range(depth)]
        values = config.num_key_value_heads * config.head_dim
        self.embedding = nn.Embedding(V, width)
        self.blocks = nn.ModuleList(GPTBlock(config, layer, gated[layer]) for layer in range(depth))
        self.value_embeddings = nn.ModuleDict(
            {str(layer): nn.Embedding(V, values) for layer in range(depth) if gated[layer]}
        )
        self.head = nn.Linear(width, V, bias=False)
        self.smear_gate = nn.Linear(min(SMEAR_CHANNELS, width), 1, bias=False)
        self.residual_scales = nn.Parameter(torch.ones(depth))
        self.x0_scales = nn.Parameter(torch.zeros(depth))
        self.smear_scale = nn.Parameter(torch.zeros(1))
        self.backout_scale = nn.Parameter(torch.zeros(1))
        self.bigrams = nn.Embedding(config.bigram_rows, width) if config.bigram_rows else None
        self.bigram_scales = nn.Parameter(torch.zeros(depth)) if config.bigram_rows else None
        self.post_init()

    def hidden_states(self, text: Text) -> Tensor:
        E, new_ids = self.config.head_dim, text.input_ids[:, -text.new :]
        base, device = self.config.rope_base, new_ids.device
        frequencies = base ** -(torch.arange(0, E, 2, dtype=torch.float32, device=device) / E)
        if self.config.key_offset:
            frequencies = half_frequencies(E, base, device)
        rotary = rotary_table(text.positions(), frequencies)
        x0 = x = self._enter(text)
        halfway = x
        bigrams = None if self.bigrams is None else self.bigrams(self._bigram_rows(text))
        for layer, block in enumerate(self.blocks):
            if bigrams is not None and self.bigram_scales is not None:
                x = x + self.bigram_scales[layer] * bigrams
            value = self.value_embeddings[str(layer)](new_ids) if str(layer) in self.value_embeddings else None
            x = block(x, x0, (self.residual_scales[layer], self.x0_scales[layer]), value, rotary, text)
            if layer == len(self.blocks) // 2 - 1:
                halfway = x
        return norm(x - self.backout_scale * halfway)

    def _enter(self, text: Text) -> Tensor:
        """The embedding, and the smear: a share of the embedding of the token before."""
        x_BTD = norm(self.embedding(text.input_ids))
        if text.valid_BT is not None:
            x_BTD = x_BTD * text.valid_BT[..., None]  # nothing is before the first token
        before_BTD = F.pad(x_BTD[:, :-1], (0, 0, 1, 0))
        x, before = x_BTD[:, -text.new :], before_BTD[:, -text.new :]
        gate = torch.sigmoid(self.smear_gate(x[..., : self.smear_gate.in_features]))
        return x + self.smear_scale * gate * before

    def _bigram_rows(self, text: Text) -> Tensor:
        """The row (B, N) of each new token with the one before it; the last one where nothing is before it."""
        ids, last = text.input_ids, self.config.bigram_rows - 1
        hashed = (BIGRAM_FACTORS[0] * ids) ^ (BIGRAM_FACTORS[1] * F.pad(ids[:, :-1], (1, 0)))
        valid = torch.ones_like(ids, dtype=torch.bool) if text.valid_BT is None else text.valid_BT
        rows = torch.where(F.pad(valid[:, :-1], (1, 0), value=False), (hashed & 0x7FFFFFFF) % last, last)
        return rows[:, -text.new :]

    def cap(self, logits: Tensor) -> Tensor:
        return self.config.softcap * torch.tanh(logits / self.config.softcap)
