"""Three value embeddings, each in one of the first and one of the last three layers.

Hypothesis: the two ends of the network can share their tables.
Source: modded-nanogpt's walkthrough (tables 0 1 2 … 0 1 2). nanochat's experiment log, 2026-01-17: worse than
alternating layers with a table each.
Expected effect: worse than the default, with fewer parameters.
Verdict: undecided on rung 0 (-0.0028 bits per byte, 8 pairs); multiplier × 1.024 [1.004, 1.044]. Study ladder-2.
Before: old baseline: better on rung 0 (-0.0053 bits per byte, 5 pairs); multiplier × 1.031 [1.013, 1.048]. Study
ladder.
"""

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from quern.model.gpt import GPT
from quern.model.layers import embed
from quern.model.unet import VALUE_EMBEDDINGS, value_embedding_of
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class ValueEndsGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        sizes = shape.vocab_size, shape.kv_heads * shape.head_dim
        tables = range(min(VALUE_EMBEDDINGS, shape.depth // 2))
        self.value_embeddings = nn.ModuleDict({f"shared{table}": nn.Embedding(*sizes) for table in tables})

    def has_value_embedding(self, layer: int) -> bool:
        return value_embedding_of(layer, self.shape.depth) is not None

    def value_embedding(self, layer: int, tokens_BT: Tensor) -> Tensor | None:
        table = value_embedding_of(layer, len(self.blocks))
        if table is None:
            return None
        return embed(tokens_BT, cast(nn.Embedding, self.value_embeddings[f"shared{table}"]).weight)


RECIPE = replace(BASELINE, name="value_embeddings_u", make_model=ValueEndsGPT)
