"""An embedding of each pair of tokens, added before every block.

Hypothesis: an embedding of each pair spares the first layers the work of learning bigrams.
Source: modded-nanogpt's pull request 201; nanochat's experiment log, 2026-01-27: a zero table of 5 · V rows, added to
every block with 0.1, helps at depth 12 on all axes; 2026-01-28: nothing is left of it in time at depth 25. The hash is
another one here.
Expected effect: better at equal steps.
Verdict: better at equal steps (-0.0531 bits per byte, 7 pairs); better at equal flops (-0.0531 bits per byte, 7 pairs);
better at equal seconds (-0.0531 bits per byte, 7 pairs). Study larger. Before: better at equal steps (-0.0100 bits per
byte, 8 pairs); better at equal flops (-0.0100 bits per byte, 8 pairs); better at equal seconds (-0.0100 bits per byte,
8 pairs). Study embeddings.

Shows `context.previous_tokens`, `before_block`, and parameters in optimizer groups that exist.
"""

from dataclasses import replace
from typing import ClassVar

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
    optimizer_groups: ClassVar = {**GPT.optimizer_groups, "bigrams": "embedding", "bigram_scales": "x0_scales"}
    lookback = 1

    def __init__(self, shape: ModelRecipe) -> None:
        super().__init__(shape)
        assert shape.vocab_size and shape.width
        self.bigrams = nn.Embedding(ROWS_PER_TOKEN * shape.vocab_size, shape.width)

    def initial_scales(self) -> dict[str, Tensor]:
        return super().initial_scales() | {"bigram_scales": torch.full((len(self.blocks),), SHARE)}

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.fill(self.bigrams.weight, 0.0)

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        if layer == 0:
            pairs_BT = (tokens_BT * MULTIPLIER + context.previous_tokens(tokens_BT, 1)) % self.bigrams.num_embeddings
            kept["bigrams"] = self.bigrams(pairs_BT)
        return x_BTD + self.bigram_scales[layer] * kept["bigrams"]


RECIPE = replace(BASELINE, name="bigram", make_model=BigramGPT)
