"""Ablation: no smear, so the embedding of the token before is not mixed in.

Hypothesis: the smear gives the first layer bigrams, which attention would otherwise have to learn.
Source: nanochat's experiment log, 2026-01-16: negligible with a gate of width² parameters. The gate of the default
reads 24 channels.
Expected effect: no difference.
Verdict: no difference on rung 0 (+0.0004 bits per byte, 8 pairs); undecided on rung 1 (-0.0007 bits per byte, 3 pairs);
undecided on rung 2 (-0.0003 bits per byte, 3 pairs); multiplier × 1.003 [0.976, 1.026], unclear. Study ladder-2.
Before: old baseline: undecided on rung 0 (+0.0014 bits per byte, 3 pairs); multiplier × 0.989 [0.940, 1.043]. Study
ladder-offset. Before: old baseline: no difference on rung 0 (+0.0005 bits per byte, 8 pairs); multiplier × 0.997
[0.985, 1.011]. Study ladder.
"""

import math
from dataclasses import replace

from torch import Tensor

from quern.model.context import Context
from quern.model.gpt import GPT
from quern.model.layers import Draw, norm
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class NoSmearGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        del self.smear_gate

    def initial_scales(self) -> dict[str, Tensor]:
        scales = super().initial_scales()
        del scales["smear_scale"]
        return scales

    def init_parameters(self, draw: Draw) -> None:
        """The baseline's values, but no gate."""
        bound = math.sqrt(3.0 / self.embedding.embedding_dim)
        draw.normal(self.embedding.weight, 0.8)
        draw.normal(self.head.weight, 0.001)
        for embedding in self.value_embeddings.parameters():
            draw.uniform(embedding, -bound, bound)
        for name, value in self.initial_scales().items():
            draw.fill(getattr(self, name), value)

    def enter(self, tokens_BT: Tensor, context: Context) -> Tensor:
        return norm(self.embedding(tokens_BT))


RECIPE = replace(BASELINE, name="no_smear", make_model=NoSmearGPT, unused=(*BASELINE.unused, "optim.smear_lr"))
