"""Ablation: the residual stream has no learned factor per layer.

Hypothesis: a factor per layer lets the model weigh early layers up or down.
Source: nanochat's experiment log, 2026-01-11: a small additional improvement over x0 alone.
Expected effect: slightly worse, or no difference.
Verdict: undecided on rung 0 (+0.0036 bits per byte, 8 pairs); multiplier × 0.970 [0.947, 0.995]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0020 bits per byte, 8 pairs); multiplier × 0.989 [0.978, 1.000]. Study
ladder.
"""

from dataclasses import replace

from torch import Tensor

from quern.model.gpt import GPT
from quern.recipes.gpt import RECIPE as BASELINE


class NoResidualScalesGPT(GPT):
    def initial_scales(self) -> dict[str, Tensor]:
        scales = super().initial_scales()
        del scales["residual_scales"]
        return scales

    def block_scales(self, layer: int) -> tuple[float, Tensor]:
        return 1.0, self.x0_scales[layer]


RECIPE = replace(
    BASELINE, name="no_residual_scales", make_model=NoResidualScalesGPT, unused=(*BASELINE.unused, "optim.residual_lr")
)
