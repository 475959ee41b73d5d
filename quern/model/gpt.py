"""The `gpt` architecture: nanochat's transformer, single-device, with no branch on train or inference.

RoPE, QK norm, ReLU², no biases, parameter-free RMSNorm (also after the embedding), untied head, grouped queries,
a residual and an x0 scalar per layer, value embeddings on alternating layers, smear, backout, tanh softcap, sliding
windows; with `model.key_offset` keys that come in part from the token before, with `model.bigrams` an embedding of
each pair of tokens. How the attention itself is computed (whole rows, cached, sharded) is the context's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from quern.kernels.rope import rotate
from quern.kernels.softcap import TanhCap
from quern.model.base import LanguageModel
from quern.model.context import Context, Window
from quern.model.layers import Draw, Embedding, Rotary, SquaredReluMLP, half_rotary_table, norm, rotary_table
from quern.recipe import ResolvedModel

KEYS = "keys"
"""Before the number of a layer, the name of its keys among what the model remembers."""


class CausalSelfAttention(nn.Module):
    """Reads its head counts off the projections' shapes, so that the same code runs on a shard of the heads."""

    optimizer_groups: ClassVar = {"value_gate": "gates"}
    qk_scale: ClassVar[float] = 1.2
    """Both normed queries and keys are scaled up by this, which sharpens attention (nanochat)."""
    gate_channels: ClassVar[int] = 12
    """Leading channels of the residual stream that the value embedding's gate looks at."""
    gate_range: ClassVar[float] = 3.0
    key_offset = False

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, *, layer: int, gated: bool) -> None:
        super().__init__()
        self.layer = layer
        self.keys_name = f"{KEYS}{layer}"  # a text that is made in `forward` would tie compiled code to one layer
        self.head_dim = head_dim
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.value_gate = nn.Linear(self.gate_channels, kv_heads, bias=False) if gated else None

    def init_parameters(self, draw: Draw) -> None:
        """Initialises as nanochat: the output is zero, the other projections uniform with deviation 1/sqrt(width)."""
        bound = math.sqrt(3.0 / self.query.in_features)
        for linear in (self.query, self.key, self.value):
            draw.uniform(linear.weight, -bound, bound)
        draw.fill(self.out.weight, 0.0)
        if self.value_gate is not None:
            draw.uniform(self.value_gate.weight, 0.0, 0.02)

    def forward(
        self, x_BTD: Tensor, value_embedding: Tensor | None, rotary: Rotary, window: Window, context: Context
    ) -> Tensor:
        """x: (B, T, D), normed; value_embedding: (B, T, K·E) or None → (B, T, D)."""
        B, T, _ = x_BTD.shape
        q_BTHE = self.query(x_BTD).view(B, T, -1, self.head_dim)
        k_BTKE = self.key(x_BTD).view(B, T, -1, self.head_dim)
        v_BTKE = self.value(x_BTD).view(B, T, -1, self.head_dim)
        v_BTKE = self.mix_values(x_BTD, v_BTKE, value_embedding)
        q_BTHE, k_BTKE = self.rotate(q_BTHE, rotary), self.keys(self.rotate(k_BTKE, rotary), context)
        return self.project_out(x_BTD, context.attend(self.layer, q_BTHE, k_BTKE, v_BTKE, window))

    def mix_values(self, x_BTD: Tensor, v_BTKE: Tensor, value_embedding: Tensor | None) -> Tensor:
        """The values that are attended to: value residual learning (arXiv 2410.17897) from an embedding of the token,
        gated by the input per head."""
        if self.value_gate is None or value_embedding is None:
            return v_BTKE
        gate_BTK = self.gate_range * torch.sigmoid(self.value_gate(x_BTD[..., : self.gate_channels]))
        return v_BTKE + gate_BTK[..., None] * value_embedding.view_as(v_BTKE)

    def rotate(self, x_BTHE: Tensor, rotary: Rotary) -> Tensor:
        """Normed and rotated queries or keys. QK norm: arXiv 2010.04245."""
        return rotate(x_BTHE, *rotary, self.qk_scale)

    def keys(self, k_BTKE: Tensor, context: Context) -> Tensor:
        """The keys that queries see, from normed and rotated ones.

        With `key_offset` the pairs without a position, (i, i + E/2) with i ≥ E/4, come from the token before.
        A query that matches them reads what followed a token, which otherwise takes two layers (modded-nanogpt's pull
        request 169).
        """
        if not self.key_offset:
            return k_BTKE
        before_BTKE = context.previous(k_BTKE.flatten(2), self.keys_name).view_as(k_BTKE)
        own, before = k_BTKE.chunk(4, dim=-1), before_BTKE.chunk(4, dim=-1)
        return torch.cat([own[0], before[1], own[2], before[3]], dim=-1)

    def project_out(self, x_BTD: Tensor, y_BTHE: Tensor) -> Tensor:
        """The output (B, T, D) from the input of the layer and the heads' attention."""
        return self.out(y_BTHE.flatten(2))


SMEAR_CHANNELS = 24
UP_SHARE = 0.4
"""The feed-forward's first matrix starts with this share of the standard deviation 1/sqrt(width)."""
BIGRAM_ROWS = 5
"""Rows of the table of bigrams for each token of the vocabulary, as in modded-nanogpt."""
BIGRAM_FACTORS = (36_313, 27_191)
"""Factors of a token and of the one before it in the hash of a bigram (modded-nanogpt)."""


class GPTBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp

    def forward(
        self,
        x_BTD: Tensor,
        x0_BTD: Tensor,
        scales: tuple[Tensor, Tensor],
        value_embedding: Tensor | None,
        rotary: Rotary,
        window: Window,
        context: Context,
    ) -> Tensor:
        x_BTD = scales[0] * x_BTD + scales[1] * x0_BTD
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), value_embedding, rotary, window, context)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def attention_norm(self, x_BTD: Tensor) -> Tensor:
        """The input of the attention."""
        return norm(x_BTD)

    def mlp_norm(self, x_BTD: Tensor) -> Tensor:
        """The input of the feed-forward."""
        return norm(x_BTD)


class Bigrams(Embedding):
    """A row for each hash of two tokens, zero at the start."""

    def init_parameters(self, draw: Draw) -> None:
        draw.fill(self.weight, 0.0)


class GPT(LanguageModel):
    """Tokens → normed hidden states; `logits` turns those into softcapped logits."""

    group_kinds: ClassVar[Mapping[str, str]] = {"gates": "scalars", "smear": "scalars", "bigrams": "embedding"}
    optimizer_groups: ClassVar[Mapping[str, str]] = {
        "embedding": "embedding",
        "head": "head",
        "residual_scales": "residual_scales",
        "x0_scales": "x0_scales",
        "bigrams": "bigrams",
        "bigram_scales": "x0_scales",
    }
    default_groups: ClassVar = ("matrices", "value_embeddings", "smear")
    compiled_parts: ClassVar = ("enter", "leave")
    vocabulary_multiple: ClassVar[int] = 64
    block_type: ClassVar[type[GPTBlock]] = GPTBlock
    attention_type: ClassVar[type[CausalSelfAttention]] = CausalSelfAttention
    mlp_type: ClassVar[type[SquaredReluMLP]] = SquaredReluMLP
    residual_scales: nn.Parameter
    x0_scales: nn.Parameter
    smear_scale: nn.Parameter
    bigrams: nn.Embedding
    bigram_scales: nn.Parameter
    backout_scale: nn.Parameter

    def __init__(self, shape: ResolvedModel) -> None:
        """shape: resolved (`resolve`). Weights are uninitialised until `initialize`."""
        super().__init__()
        self.shape = shape
        self.cap = TanhCap(shape.softcap)
        self.windows = shape.window_sizes()
        self.attention_layers = list(range(shape.depth))
        self.head_dim = shape.head_dim
        keys = [f"{KEYS}{layer}" for layer in range(shape.depth) if self.has_key_offset(layer)]
        self.remembered = {"embedding": shape.width} | dict.fromkeys(keys, shape.kv_heads * shape.head_dim)
        # nanochat taps one block later. Over three paired seeds (depth 4, width 128, 200 steps of 2,048 tokens) that
        # changed the bits per byte by -0.013, -0.003 and +0.002: no difference, so the tap stays.
        self.backout_layer = shape.depth // 2 - 1
        self.kept_layers = {self.backout_layer}
        """Layers whose outputs `before_block` and backout read."""
        self.embedding = Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(shape.depth))
        self.value_embeddings = nn.ModuleDict(
            {
                str(layer): Embedding(shape.vocab_size, shape.kv_heads * shape.head_dim)
                for layer in range(shape.depth)
                if self.has_value_embedding(layer)
            }
        )
        if shape.bigrams:
            self.bigrams = Bigrams(BIGRAM_ROWS * shape.vocab_size, shape.width)
            self.bigram_dropout = nn.Dropout(shape.bigram_dropout)
            self.lookback = max(1, self.lookback)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.smear_gate = nn.Linear(min(SMEAR_CHANNELS, shape.width), 1, bias=False)
        with torch.device("cpu"):  # arithmetic on "meta" would import PyTorch's compiler
            scales = self.initial_scales()
        for name, value in scales.items():
            setattr(self, name, nn.Parameter(torch.empty(value.shape)))

    def initial_scales(self) -> dict[str, Tensor]:
        """The initial values of the scalars on the residual stream, by the name of their parameter."""
        share = torch.arange(len(self.blocks)) / max(1, len(self.blocks) - 1)
        return {
            "residual_scales": 1.15 - 0.10 * share,
            "x0_scales": 0.20 - 0.15 * share,
            "smear_scale": torch.zeros(1),
            "backout_scale": torch.full((1,), 0.2),
        } | ({"bigram_scales": torch.full((len(self.blocks),), 0.1)} if self.shape.bigrams else {})

    def has_value_embedding(self, layer: int) -> bool:
        """Whether a layer has a value embedding: alternating layers, the last one included."""
        return layer % 2 == (self.shape.depth - 1) % 2

    def has_key_offset(self, layer: int) -> bool:
        """Whether half of the channels of a layer's keys come from the token before, as where it sees all tokens."""
        return self.shape.key_offset and self.windows[layer] is None

    def make_block(self, layer: int) -> nn.Module:
        """The block of a layer; it is called as `GPTBlock.forward`."""
        return self.block_type(self.make_attention(layer), self.make_mlp(layer))

    def make_attention(self, layer: int) -> nn.Module:
        """The attention of a layer; it is called as `CausalSelfAttention.forward`."""
        shape = self.shape
        sizes = shape.width, shape.heads, shape.kv_heads, shape.head_dim
        attention = self.attention_type(*sizes, layer=layer, gated=self.has_value_embedding(layer))
        attention.key_offset = self.has_key_offset(layer)
        return attention

    def make_mlp(self, layer: int) -> nn.Module:
        """The feed-forward of a layer: (B, T, D) → (B, T, D)."""
        return self.mlp_type(self.shape.width, UP_SHARE)

    def forward(self, tokens_BT: Tensor, context: Context) -> Tensor:
        """tokens: (B, T) integers → (B, T, D) normed hidden states in the parameters' dtype."""
        x_BTD, kept = self.layers(self.enter(tokens_BT, context), tokens_BT, context)
        return self.leave(x_BTD, kept[self.backout_layer])

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        """Hook: returns the stream that enters a block. kept: the streams after `kept_layers` so far, by layer; -1 is
        the one that enters the first block. An idea may keep tensors of its own under a name."""
        return x_BTD

    def layers(self, x_BTD: Tensor, tokens_BT: Tensor, context: Context) -> tuple[Tensor, dict[int | str, Tensor]]:
        """Runs the blocks → the stream after the last one, and after each of `kept_layers` (-1: before the first)."""
        x0_BTD = x_BTD.view_as(x_BTD)  # a tensor object of its own: otherwise the first block compiles separately
        rotary = self.rotary(context.positions(x_BTD))
        kept: dict[int | str, Tensor] = {-1: x_BTD}
        windows = context.windows(self.windows)
        bigrams_BTD = None
        if self.shape.bigrams:
            bigrams_BTD = self.bigrams(self.bigram_rows(tokens_BT, context.previous_tokens(tokens_BT, 1)))
            if self.training and self.shape.bigram_dropout:  # unlike dropout, without scaling the others up
                bigrams_BTD = bigrams_BTD * (self.bigram_dropout(torch.ones_like(bigrams_BTD[..., :1])) > 0)
        for layer, block in enumerate(self.blocks):
            x_BTD = self.before_block(layer, x_BTD, kept, tokens_BT, context)
            if bigrams_BTD is not None:
                x_BTD = x_BTD + self.bigram_scales[layer] * bigrams_BTD
            value, scales = self.value_embedding(layer, tokens_BT), self.block_scales(layer)
            x_BTD = block(x_BTD, x0_BTD, scales, value, rotary, windows[layer], context)
            if layer in self.kept_layers:
                kept[layer] = x_BTD
        return x_BTD, kept

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1 or B, T, 1, E / 2) of the rotary angles at (1 or B, T) positions."""
        table = half_rotary_table if self.shape.key_offset else rotary_table
        return table(positions, self.head_dim, self.shape.rope_base)

    def value_embedding(self, layer: int, tokens_BT: Tensor) -> Tensor | None:
        """The values that are added to a layer's own: (B, T, K·E), or None."""
        key = str(layer)
        if key not in self.value_embeddings:
            return None
        return self.value_embeddings[key](tokens_BT)

    def bigram_rows(self, tokens_BT: Tensor, before_BT: Tensor) -> Tensor:
        """The table's row (B, T) of each token with the one before it, -1 if there is none: it has the last row.

        The hash of both is modded-nanogpt's bigram hash embedding; of its bits the 31 lowest count, which 32-bit
        integers have too.
        """
        last = BIGRAM_ROWS * self.shape.vocab_size - 1
        hashed_BT = (BIGRAM_FACTORS[0] * tokens_BT) ^ (BIGRAM_FACTORS[1] * before_BT)
        return torch.where(before_BT < 0, last, (hashed_BT & 0x7FFFFFFF) % last)

    def block_scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """The factors of the stream and of x0 at the start of a block."""
        return self.residual_scales[layer], self.x0_scales[layer]

    def enter(self, tokens_BT: Tensor, context: Context) -> Tensor:
        """Embedding and smear."""
        x_BTD = norm(self.embedding(tokens_BT))
        gate_BT1 = torch.sigmoid(self.smear_gate(x_BTD[..., : self.smear_gate.in_features]))
        return x_BTD + self.smear_scale * gate_BT1 * context.previous(x_BTD, "embedding")

    def leave(self, x_BTD: Tensor, halfway_BTD: Tensor) -> Tensor:
        """Backout and the last norm."""
        return norm(x_BTD - self.backout_scale * halfway_BTD)

    def init_parameters(self, draw: Draw) -> None:
        """Initialises as nanochat: writes to the residual stream are zero, so the network starts as its embedding."""
        bound = math.sqrt(3.0 / self.embedding.embedding_dim)
        draw.normal(self.embedding.weight, 0.8)
        draw.normal(self.head.weight, 0.001)
        for embedding in self.value_embeddings.parameters():
            draw.uniform(embedding, -bound, bound)
        draw.uniform(self.smear_gate.weight, 0.0, 0.02)
        for name, value in self.initial_scales().items():
            draw.fill(getattr(self, name), value)
