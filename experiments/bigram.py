"""Hypothesis: an embedding of each pair of tokens spares the first layers the work of learning bigrams.

Source: modded-nanogpt's bigram hash embedding: a zero table of 5 · V rows, added to every block with 0.1.
Expected effect: fewer steps to the same loss.
Verdict: not measured. Shows `context.previous_tokens`, `before_block`, and a parameter that finds its optimizer group.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.model.initialize import Draw
from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

ROWS_PER_TOKEN = 5
SHARE = 0.1
MULTIPLIER = 1_000_003  # a prime, so that pairs spread over the table


class BigramGPT(GPT):
    lookback = 1

    def __init__(self, shape: ModelRecipe) -> None:
        super().__init__(shape)
        assert shape.vocab_size and shape.width and shape.depth
        self.bigrams = nn.Embedding(ROWS_PER_TOKEN * shape.vocab_size, shape.width)
        self.bigram_scales = nn.Parameter(torch.empty(shape.depth))

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.fill(self.bigrams.weight, 0.0)
        draw.fill(self.bigram_scales, SHARE)

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        if layer == 0:
            pairs_BT = (tokens_BT * MULTIPLIER + context.previous_tokens(tokens_BT, 1)) % self.bigrams.num_embeddings
            kept["bigrams"] = self.bigrams(pairs_BT)
        return x_BTD + self.bigram_scales[layer] * kept["bigrams"]


RECIPE = replace(BASELINE, name="bigram", make_model=BigramGPT)
