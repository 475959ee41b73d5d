"""Value embeddings of an eighth of the rank, each with a projection.

Hypothesis: the tables have few useful directions.
Source: nanochat's experiment log, 2026-01-17: low-rank decompositions and projections all failed.
Expected effect: worse, with far fewer parameters.
Verdict: worse on rung 0 (+0.0606 bits per byte, 3 pairs); multiplier × 0.603 [0.576, 0.633]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0278 bits per byte, 3 pairs); multiplier × 0.853 [0.835, 0.871]. Study ladder.
"""

import math
from dataclasses import replace
from typing import ClassVar, cast

from torch import Tensor, nn

from quern.model.gpt import GPT
from quern.model.layers import Draw, embed
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE

SHARE = 8


class LowRankValuesGPT(GPT):
    optimizer_groups: ClassVar = {**GPT.optimizer_groups, "value_projections": "matrices"}

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        size = shape.kv_heads * shape.head_dim
        layers = list(self.value_embeddings)
        self.value_embeddings = nn.ModuleDict({key: nn.Embedding(shape.vocab_size, size // SHARE) for key in layers})
        self.value_projections = nn.ModuleDict({key: nn.Linear(size // SHARE, size, bias=False) for key in layers})

    def value_embedding(self, layer: int, tokens_BT: Tensor) -> Tensor | None:
        key = str(layer)
        if key not in self.value_embeddings:
            return None
        return self.value_projections[key](embed(tokens_BT, cast(nn.Embedding, self.value_embeddings[key]).weight))

    def init_parameters(self, draw: Draw) -> None:
        """A product of table and projection has the deviation that the whole table would have."""
        super().init_parameters(draw)
        for projection in self.value_projections.parameters():
            bound = math.sqrt(3.0 / projection.size(1))
            draw.uniform(projection, -bound, bound)


RECIPE = replace(BASELINE, name="value_embeddings_low_rank", make_model=LowRankValuesGPT)
