"""Engram: an embedding of each pair of tokens, gated by the stream, added once after the first block.

Hypothesis: the stream knows when a looked-up pattern is of use.
Source: Engram (arXiv 2601.07372), without its convolution and its several hashes. nanochat's experiment log,
2026-01-27: a slight improvement; direct addition in all layers is simpler and better.
Expected effect: slightly better at equal steps.
Verdict: better on rung 0 (-0.0571 bits per byte, 3 pairs); better on rung 1 (-0.0457 bits per byte, 3 pairs); better on
rung 2 (-0.0295 bits per byte, 3 pairs); multiplier × 1.325 [1.312, 1.344], fades. Study ladder-2. Before: old baseline:
better on rung 0 (-0.0593 bits per byte, 3 pairs); multiplier × 1.592 [1.516, 1.671]. Study ladder-offset. Before: old
baseline: better on rung 0 (-0.0698 bits per byte, 3 pairs); undecided on rung 1 (-0.0124 bits per byte, 3 pairs);
better on rung 2 (-0.0137 bits per byte, 4 pairs); multiplier × 1.080 [1.055, 1.108], fades. Study ladder.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.model.layers import Draw, norm
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE

ROWS_PER_TOKEN = 5
MULTIPLIER = 1_000_003  # a prime, so that pairs spread over the table


class EngramGPT(GPT):
    optimizer_groups: ClassVar = {
        **GPT.optimizer_groups,
        "bigrams": "embedding",
        "engram_key": "matrices",
        "engram_value": "matrices",
    }
    lookback = 1

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.bigrams = nn.Embedding(ROWS_PER_TOKEN * shape.vocab_size, shape.width)
        self.engram_key = nn.Linear(shape.width, shape.width, bias=False)
        self.engram_value = nn.Linear(shape.width, shape.width, bias=False)

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.normal(self.bigrams.weight, 0.8)
        draw.normal(self.engram_key.weight, self.engram_key.in_features**-0.5)
        draw.fill(self.engram_value.weight, 0.0)

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        if layer != 1:
            return x_BTD
        pairs_BT = (tokens_BT * MULTIPLIER + context.previous_tokens(tokens_BT, 1)) % self.bigrams.num_embeddings
        pairs_BTD = norm(self.bigrams(pairs_BT))
        match_BT1 = (norm(x_BTD) * norm(self.engram_key(pairs_BTD))).sum(-1, keepdim=True)
        return x_BTD + torch.sigmoid(match_BT1 / x_BTD.size(-1) ** 0.5) * self.engram_value(pairs_BTD)


RECIPE = replace(
    BASELINE, name="engram", make_model=EngramGPT, unused=(*BASELINE.unused, "model.bigrams", "model.bigram_dropout")
)
