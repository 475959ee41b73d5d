"""Embeddings of each pair and of each triple of tokens, put side by side.

Hypothesis: triples hold patterns that pairs do not.
Source: nanochat's experiment log, 2026-01-27: no improvement over bigrams alone; triples dilute the capacity for
frequent pairs.
Expected effect: no better than bigram.py.
Verdict: better on rung 0 (-0.0362 bits per byte, 3 pairs); better on rung 1 (-0.0345 bits per byte, 3 pairs); better on
rung 2 (-0.0308 bits per byte, 3 pairs); multiplier × 1.374 [1.318, 1.432], unclear. Study ladder-2. Before: old
baseline: better on rung 0 (-0.0340 bits per byte, 3 pairs); multiplier × 1.319 [1.229, 1.414]. Study ladder-offset.
Before: old baseline: better on rung 0 (-0.0488 bits per byte, 3 pairs); undecided on rung 1 (-0.0027 bits per byte, 3
pairs); better on rung 2 (-0.0239 bits per byte, 3 pairs); multiplier × 1.189 [1.171, 1.209], fades. Study ladder.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.model.layers import Draw
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE

ROWS_PER_TOKEN = 5
MULTIPLIER = 1_000_003  # a prime, so that pairs spread over the table


class TrigramGPT(GPT):
    optimizer_groups: ClassVar = {
        **GPT.optimizer_groups,
        "bigrams": "embedding",
        "trigrams": "embedding",
        "ngram_scales": "x0_scales",
    }
    lookback = 2

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        rows, width = ROWS_PER_TOKEN * shape.vocab_size, shape.width
        self.bigrams = nn.Embedding(rows, width // 2)
        self.trigrams = nn.Embedding(rows, width - width // 2)

    def initial_scales(self) -> dict[str, Tensor]:
        return super().initial_scales() | {"ngram_scales": torch.full((len(self.blocks),), 0.1)}

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.fill(self.bigrams.weight, 0.0)
        draw.fill(self.trigrams.weight, 0.0)

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        if layer == 0:
            pairs_BT = tokens_BT * MULTIPLIER + context.previous_tokens(tokens_BT, 1)
            triples_BT = pairs_BT * MULTIPLIER + context.previous_tokens(tokens_BT, 2)
            rows = self.bigrams.num_embeddings
            kept["ngrams"] = torch.cat([self.bigrams(pairs_BT % rows), self.trigrams(triples_BT % rows)], dim=-1)
        return x_BTD + self.ngram_scales[layer] * kept["ngrams"]


RECIPE = replace(
    BASELINE, name="trigram", make_model=TrigramGPT, unused=(*BASELINE.unused, "model.bigrams", "model.bigram_dropout")
)
