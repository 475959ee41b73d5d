"""Ablation: the head shares the matrix of the embedding.

Hypothesis: untied matrices learn more, since the embedding and the head need different rows and rates.
Source: Press & Wolf 2017 (arXiv 1608.05859) tie them; the speedrun and nanochat untie them. Here hidden states are
divided by 0.8 · sqrt(width), so that the first logits have a deviation of 1, and the rate is the embedding's.
Expected effect: worse at equal steps, with one matrix less.
Verdict: worse on rung 0 (+0.0531 bits per byte, 3 pairs); multiplier × 0.643 [0.616, 0.670]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0669 bits per byte, 3 pairs); multiplier × 0.688 [0.634, 0.746]. Study ladder.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from quern.model.gpt import GPT
from quern.model.layers import Draw
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE

STD = 0.8
"""Standard deviation of the embedding's initial values."""


class TiedGPT(GPT):
    group_kinds: ClassVar[Mapping[str, str]] = {**GPT.group_kinds, "embedding": "head"}

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.head.weight = self.embedding.weight

    def leave(self, x_BTD: Tensor, halfway_BTD: Tensor) -> Tensor:
        return super().leave(x_BTD, halfway_BTD) / (STD * self.embedding.embedding_dim**0.5)

    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        draw.normal(self.embedding.weight, STD)


RECIPE = replace(BASELINE, name="tied_head", make_model=TiedGPT, unused=(*BASELINE.unused, "optim.head_lr"))
