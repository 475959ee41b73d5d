"""The feed-forward is eight times as wide as the stream, not four times.

Hypothesis: more parameters lower the loss at equal steps, though not for free.
Source: Kaplan et al. 2020 (arXiv 2001.08361): at equal tokens, more parameters are better.
Expected effect: better at equal steps.
Verdict: no difference on rung 0 (-0.0011 bits per byte, 8 pairs); no difference on rung 1 (-0.0001 bits per byte, 5
pairs); multiplier × 0.696 [0.683, 0.710], fades. Study ladder-2. Before: old baseline: undecided on rung 0 (-0.0019
bits per byte, 3 pairs); undecided on rung 1 (+0.0006 bits per byte, 4 pairs); multiplier × 0.691 [0.678, 0.704], fades.
Study ladder-offset. Before: old baseline: no difference on rung 0 (+0.0010 bits per byte, 8 pairs); multiplier × 0.742
[0.736, 0.748]. Study ladder.
"""

from dataclasses import replace

from torch import nn

from quern.model.gpt import GPT
from quern.model.layers import SquaredReluMLP
from quern.recipes.gpt import RECIPE as BASELINE


class WideMLP(SquaredReluMLP):
    def __init__(self, width: int, up_share: float) -> None:
        super().__init__(width, up_share)
        self.up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(8 * width, width, bias=False)


class WideGPT(GPT):
    mlp_type = WideMLP


RECIPE = replace(BASELINE, name="wide_mlp", make_model=WideGPT)
