"""An embedding of each pair of tokens, added before every block, with the decay of the value embeddings times four.

Hypothesis: a pair's row forgets between two of its uses, so that the table keeps pairs that are frequent; without decay
it learns by heart a text that is read several times (bigram_early.py).
Source: ours. The table is that of bigram.py. The shares of rare pairs shrink most, as in smoothed counts (Kneser and
Ney 1995).
Expected effect: better at equal steps.
Verdict: better on rung 0 (-0.0516 bits per byte, 3 pairs); better on rung 1 (-0.0497 bits per byte, 3 pairs);
multiplier × 1.597 [1.552, 1.644], unclear. Study ladder-2.

On English that is read 4.3 to 5.4 times, at depths 2 and 3, it is better by 0.009 to 0.028 bits per byte
(docs/ladder.md); bigram_early.py became worse there in the third reading.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.model.layers import Draw
from quern.optim.constants import MOST_DECAY
from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved, ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE

ROWS_PER_TOKEN = 5
SHARE = 0.1
FACTORS = (36_313, 27_191)
TIMES = 4
"""The rows' decay, in that of the value embeddings, which grows with the readings of the text."""


class DecayedBigramGPT(GPT):
    optimizer_groups: ClassVar = {**GPT.optimizer_groups, "bigrams": "bigrams", "bigram_scales": "x0_scales"}
    group_kinds: ClassVar = {**GPT.group_kinds, "bigrams": "embedding"}
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


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """The baseline's rules, and one for the table."""
    rules = table(recipe)
    values = rules["value_embeddings"]
    decay = min(TIMES * values.rule.weight_decay, MOST_DECAY / values.lr)
    return rules | {"bigrams": values._replace(rule=replace(values.rule, weight_decay=decay))}


RECIPE = replace(BASELINE, name="bigram_decay", make_model=DecayedBigramGPT, make_rules=rules)
