"""All layers with value embeddings share one table.

Hypothesis: one table is enough.
Source: nanochat's experiment log, 2026-01-17: every attempt to share parameters failed.
Expected effect: worse, with far fewer parameters.
Verdict: worse on rung 0 (+0.0079 bits per byte, 5 pairs); multiplier × 0.936 [0.912, 0.961]. Study ladder-2. Before:
old baseline: worse, small on rung 0 (+0.0046 bits per byte, 5 pairs); multiplier × 0.974 [0.964, 0.985]. Study ladder.
"""

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from quern.model.gpt import GPT
from quern.model.layers import embed
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class SharedValuesGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        table = nn.Embedding(shape.vocab_size, shape.kv_heads * shape.head_dim)
        self.value_embeddings = nn.ModuleDict({"shared": table})

    def value_embedding(self, layer: int, tokens_BT: Tensor) -> Tensor | None:
        if not self.has_value_embedding(layer):
            return None
        return embed(tokens_BT, cast(nn.Embedding, self.value_embeddings["shared"]).weight)


RECIPE = replace(BASELINE, name="value_embeddings_shared", make_model=SharedValuesGPT)
