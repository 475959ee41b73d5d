"""An embedding of each pair of tokens, added before every block.

Hypothesis: an embedding of each pair spares the first layers the work of learning bigrams.
Source: modded-nanogpt's pull request 201; nanochat's experiment log, 2026-01-27: a zero table of 5 · V rows, added to
every block with 0.1, helps at depth 12 on all axes; 2026-01-28: nothing is left of it in time at depth 25. The hash is
the log's: two products, XOR, and the remainder.
Expected effect: better at equal steps.
Changed: 2026-11-25T20:00, the hash was a sum of the ids, one of them times a prime.
Verdict: better on rung 0 (-0.0468 bits per byte, 3 pairs); better on rung 1 (-0.0403 bits per byte, 3 pairs); better on
rung 2 (-0.0312 bits per byte, 3 pairs); multiplier × 1.378 [1.365, 1.399], fades. Study ladder-2. Before: old baseline:
better on rung 0 (-0.0501 bits per byte, 3 pairs); multiplier × 1.507 [1.436, 1.587]. Study ladder-offset. Before: old
baseline: better on rung 0 (-0.0590 bits per byte, 3 pairs); undecided on rung 1 (+0.0032 bits per byte, 5 pairs);
multiplier × 0.980 [0.897, 1.064], fades. Study ladder.

Shows `context.previous_tokens`, `before_block`, and parameters in optimizer groups that exist.
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
SHARE = 0.1
FACTORS = (36_313, 27_191)


class BigramGPT(GPT):
    optimizer_groups: ClassVar = {**GPT.optimizer_groups, "bigrams": "embedding", "bigram_scales": "x0_scales"}
    lookback = 1

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.bigrams = nn.Embedding(ROWS_PER_TOKEN * shape.vocab_size, shape.width)

    def initial_scales(self) -> dict[str, Tensor]:
        return super().initial_scales() | {"bigram_scales": torch.full((len(self.blocks),), SHARE)}

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.fill(self.bigrams.weight, 0.0)

    def row_of(self, tokens_BT: Tensor, before_BT: Tensor) -> Tensor:
        """The table's row of each pair; the last row belongs to the first token, which has none before it."""
        last = self.bigrams.num_embeddings - 1
        hashed_BT = ((FACTORS[0] * tokens_BT) ^ (FACTORS[1] * before_BT)) % last
        return torch.where(before_BT < 0, last, hashed_BT)

    def before_block(
        self, layer: int, x_BTD: Tensor, kept: dict[int | str, Tensor], tokens_BT: Tensor, context: Context
    ) -> Tensor:
        if layer == 0:
            kept["bigrams"] = self.bigrams(self.row_of(tokens_BT, context.previous_tokens(tokens_BT, 1)))
        return x_BTD + self.bigram_scales[layer] * kept["bigrams"]


RECIPE = replace(
    BASELINE, name="bigram", make_model=BigramGPT, unused=(*BASELINE.unused, "model.bigrams", "model.bigram_dropout")
)
