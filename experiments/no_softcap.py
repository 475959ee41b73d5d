"""Ablation: the logits have no cap.

Hypothesis: the cap prevents overconfident logits and makes low precision safe.
Source: Gemma 2 (arXiv 2408.00118); nanochat caps at 15 · tanh(z / 15), modded-nanogpt at 30 · sigmoid.
Expected effect: no difference at small sizes.
Verdict: no difference on rung 0 (+0.0002 bits per byte, 8 pairs); multiplier × 0.998 [0.975, 1.021]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0007 bits per byte, 8 pairs); multiplier × 0.996 [0.986, 1.005]. Study
ladder.
"""

from dataclasses import replace

from quern.kernels.softcap import NoCap
from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class UncappedGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.cap = NoCap()


RECIPE = replace(BASELINE, name="no_softcap", make_model=UncappedGPT, unused=(*BASELINE.unused, "model.softcap"))
