"""Predict the token that is the longest prefix of the next token's bytes, beside the next token.

Hypothesis: tokens that begin alike teach each other, which a vocabulary hides from the model.
Source: modded-nanogpt's pull request 337, on top of its prediction of further tokens: 15 steps fewer of 1,390. The
weight and its fall to zero are ours.
Expected effect: better at equal steps, slower by another product with the head.
Verdict: undecided on rung 0 (-0.0019 bits per byte, 8 pairs); multiplier × 0.793 [0.769, 0.818]. Study ladder-2.
Before: old baseline: better, small on rung 0 (-0.0033 bits per byte, 8 pairs); multiplier × 0.795 [0.788, 0.803]. Study
ladder.

Shows the seam `LanguageModel.read_vocabulary`; evaluation stays the loss of the next token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE

WEIGHT = 0.2
"""Weight of the loss on the prefix at the start. It falls linearly: a prefix is not what follows in the text."""
ENDS = 2 / 3
"""The share of the run after which prefixes are no longer predicted."""
NONE = -1


class PrefixTokenGPT(GPT):
    prefixes_V: Tensor

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.register_buffer("prefixes_V", torch.full((shape.vocab_size,), NONE), persistent=False)

    def read_vocabulary(self, tokens: Sequence[bytes]) -> None:
        ids = {token: id_ for id_, token in enumerate(tokens) if token}
        found = []
        for token in tokens:
            prefixes = (token[:size] for size in range(len(token) - 1, 0, -1))
            found.append(next((ids[prefix] for prefix in prefixes if prefix in ids), NONE))
        self.prefixes_V[: len(found)] = torch.tensor(found)

    def loss(
        self, x_BTD: Tensor, targets_BT: Tensor, scale_BT: Tensor, context: CausalContext
    ) -> tuple[Tensor, Tensor]:
        total, losses_BT = super().loss(x_BTD, targets_BT, scale_BT, context)
        weight = WEIGHT * max(0.0, 1 - context.progress / ENDS)
        if weight > 0 and torch.is_grad_enabled():
            prefixes_BT = self.prefixes_V[targets_BT]
            scale_BT = weight * scale_BT * (prefixes_BT != NONE)
            total = total + super().loss(x_BTD, prefixes_BT.clamp(min=0), scale_BT, context)[0]
        return total, losses_BT


RECIPE = replace(BASELINE, name="prefix_token", make_model=PrefixTokenGPT)
