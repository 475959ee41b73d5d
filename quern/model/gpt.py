"""The `gpt` architecture: nanochat's transformer, single-device, with no branch on train or inference.

RoPE, QK norm, ReLU², no biases, parameter-free RMSNorm (also after the embedding), untied head, grouped queries,
a residual and an x0 scalar per layer, value embeddings on alternating layers, smear, backout, tanh softcap, sliding
windows. Initialisation and the grouping of parameters for the optimizer stand here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from quern.kernels.embedding import embed
from quern.kernels.softcap import Cap, TanhCap
from quern.model.attention import CausalSelfAttention
from quern.model.context import CausalContext, Context
from quern.model.layers import Embedding, SquaredReluMLP, norm, rotary_table
from quern.recipe import ModelRecipe

SMEAR_CHANNELS = 24


def has_value_embedding(layer: int, depth: int) -> bool:
    """Alternating layers, the last one always among them."""
    return layer % 2 == (depth - 1) % 2


class GPTBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, shape: ModelRecipe, layer: int) -> None:
        super().__init__()
        assert shape.width and shape.heads and shape.kv_heads and shape.head_dim and shape.depth
        gated = has_value_embedding(layer, shape.depth)
        self.attention = CausalSelfAttention(
            shape.width, shape.heads, shape.kv_heads, shape.head_dim, layer=layer, gated=gated
        )
        self.mlp = SquaredReluMLP(shape.width)

    def forward(
        self,
        x_BTD: Tensor,
        x0_BTD: Tensor,
        scales: tuple[Tensor, Tensor],
        value_embedding: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        window: int | None,
        context: Context,
    ) -> Tensor:
        x_BTD = scales[0] * x_BTD + scales[1] * x0_BTD
        x_BTD = x_BTD + self.attention(norm(x_BTD), value_embedding, rotary, window, context)
        return x_BTD + self.mlp(norm(x_BTD))


class GPT(nn.Module):
    """tokens → normed hidden states; `logits` turns those into softcapped logits."""

    group_kinds: ClassVar[Mapping[str, str]] = {
        "matrices": "matrices",
        "head": "head",
        "embedding": "embedding",
        "value_embeddings": "value_embeddings",
        "gates": "scalars",
        "residual_scales": "scalars",
        "x0_scales": "scalars",
        "smear": "scalars",
    }

    def __init__(self, shape: ModelRecipe) -> None:
        """shape: resolved (`recipe.resolve`). Weights are uninitialised until `init_parameters`."""
        super().__init__()
        assert shape.depth and shape.width and shape.vocab_size and shape.kv_heads and shape.head_dim
        self.shape = shape
        self.cap: Cap = TanhCap(shape.softcap)
        self.windows = shape.window_sizes()
        self.attention_layers = list(range(shape.depth))
        self.head_dim = shape.head_dim
        self.embedding: nn.Embedding = Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(GPTBlock(shape, layer) for layer in range(shape.depth))
        self.value_embeddings = nn.ModuleDict(
            {
                str(layer): nn.Embedding(shape.vocab_size, shape.kv_heads * shape.head_dim)
                for layer in range(shape.depth)
                if has_value_embedding(layer, shape.depth)
            }
        )
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.residual_scales = nn.Parameter(torch.empty(shape.depth))
        self.x0_scales = nn.Parameter(torch.empty(shape.depth))
        self.smear_gate = nn.Linear(min(SMEAR_CHANNELS, shape.width), 1, bias=False)
        self.smear_scale = nn.Parameter(torch.empty(1))
        self.backout_scale = nn.Parameter(torch.empty(1))

    def forward(self, tokens_BT: Tensor, context: Context) -> Tensor:
        """tokens: (B, T) integers → (B, T, D) normed hidden states in the parameters' dtype."""
        x_BTD = self._enter(tokens_BT, context)
        x0_BTD = x_BTD.view_as(x_BTD)  # an object of its own: the compiler would tell the first block apart otherwise
        rotary = rotary_table(context.positions(x_BTD), self.head_dim, self.shape.rope_base)
        halfway, halfway_BTD = len(self.blocks) // 2, x_BTD
        for layer, block in enumerate(self.blocks):
            if layer == halfway:
                halfway_BTD = x_BTD
            key = str(layer)
            value = (
                embed(tokens_BT, cast(nn.Embedding, self.value_embeddings[key]).weight)
                if key in self.value_embeddings
                else None
            )
            scales = self.residual_scales[layer], self.x0_scales[layer]
            x_BTD = block(x_BTD, x0_BTD, scales, value, rotary, self.windows[layer], context)
        return self._leave(x_BTD, halfway_BTD)

    def _enter(self, tokens_BT: Tensor, context: Context) -> Tensor:
        """Embedding and smear."""
        x_BTD = norm(self.embedding(tokens_BT))
        gate_BT1 = torch.sigmoid(self.smear_gate(x_BTD[..., : self.smear_gate.in_features]))
        return x_BTD + self.smear_scale * gate_BT1 * context.previous(x_BTD)

    def _leave(self, x_BTD: Tensor, halfway_BTD: Tensor) -> Tensor:
        """Backout and the last norm."""
        return norm(x_BTD - self.backout_scale * halfway_BTD)

    def compile(self, **options: Any) -> None:
        """Compiles by block, so that layers of one kind share a compilation. options: of torch.compile."""
        for block in self.blocks:
            block.compile(**options)
        self._enter = torch.compile(self._enter, **options)
        self._leave = torch.compile(self._leave, **options)

    def context(self, tokens_BT: Tensor, window: float = 1.0) -> CausalContext:
        """Whole rows, in which documents see each other; windows do not grow."""
        return CausalContext()

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Hidden states (…, D) → fp32 logits (…, V), softcapped."""
        return self.cap(self.head(x_BTD).float())

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        """Fills every parameter, in a fixed order, from a CPU generator; raises if one was left out.

        As nanochat: projections that write to the residual stream start at zero, so that the network starts as its
        embedding; matrices are uniform with standard deviation 1/sqrt(width) (0.4 of that into the feed-forward).
        """
        depth, width = len(self.blocks), self.embedding.weight.size(1)
        bound = math.sqrt(3.0 / width)
        values: dict[Tensor, Tensor] = {}

        def uniform(p: Tensor, low: float, high: float) -> None:
            values[p] = torch.empty(p.shape).uniform_(low, high, generator=generator)

        def normal(p: Tensor, std: float) -> None:
            values[p] = torch.empty(p.shape).normal_(0.0, std, generator=generator)

        normal(self.embedding.weight, 0.8)
        normal(self.head.weight, 0.001)
        for block in cast(list[GPTBlock], list(self.blocks)):
            for linear in (block.attention.query, block.attention.key, block.attention.value):
                uniform(linear.weight, -bound, bound)
            values[block.attention.out.weight] = torch.zeros(block.attention.out.weight.shape)
            uniform(block.mlp.up.weight, -0.4 * bound, 0.4 * bound)
            values[block.mlp.down.weight] = torch.zeros(block.mlp.down.weight.shape)
            if block.attention.value_gate is not None:
                uniform(block.attention.value_gate.weight, 0.0, 0.02)
        for embedding in self.value_embeddings.parameters():
            uniform(embedding, -bound, bound)
        share = torch.arange(depth) / max(1, depth - 1)
        values[self.residual_scales] = 1.15 - 0.10 * share
        values[self.x0_scales] = 0.20 - 0.15 * share
        uniform(self.smear_gate.weight, 0.0, 0.02)
        values[self.smear_scale] = torch.zeros(1)
        values[self.backout_scale] = torch.full((1,), 0.2)
        missing = [name for name, p in self.named_parameters() if p not in values]
        if missing:
            raise ValueError(f"no initial value is given for {', '.join(missing)}: add it to init_parameters")
        for p, value in values.items():
            p.copy_(value)

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Which optimizer rule each parameter falls under, by group name (optim/groups.py)."""
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, p in self.named_parameters():
            groups.setdefault(_group(name), []).append((name, p))
        return groups


def _group(name: str) -> str:
    if name.startswith("blocks."):
        return "gates" if "value_gate" in name else "matrices"
    if name.startswith(("smear", "backout")):
        return "smear"
    return name.split(".")[0]
