"""Ablation: the embedding is not mixed into every block.

Hypothesis: a direct path from the embedding to deep layers preserves the identity of the token.
Source: nanochat's experiment log, 2026-01-11: the scalars of x0 gained 0.0103 (depth 8) to 0.0039 (depth 20) bits
per byte.
Expected effect: 0.005 to 0.01 bits per byte worse.
Verdict: worse on rung 0 (+0.0070 bits per byte, 8 pairs); multiplier × 0.942 [0.917, 0.969]. Study ladder-2. Before:
old baseline: no difference on rung 0 (+0.0018 bits per byte, 5 pairs); multiplier × 0.990 [0.981, 0.999]. Study ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class NoX0GPT(GPT):
    def initial_scales(self) -> dict[str, Tensor]:
        scales = super().initial_scales()
        del scales["x0_scales"]
        return scales

    def block_scales(self, layer: int) -> tuple[Tensor, float]:
        return self.residual_scales[layer], 0.0


RECIPE = replace(BASELINE, name="no_x0", make_model=NoX0GPT, unused=(*BASELINE.unused, "optim.x0_lr"))
