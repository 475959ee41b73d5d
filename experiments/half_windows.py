"""Short windows see half of the context, not a quarter.

Hypothesis: a quarter of the context is enough for three layers of four.
Source: nanochat's experiment log, 2026-01-11, when the short window was T / 2; nanochat changed it to T / 4 later.
Expected effect: no difference at equal steps, slower.
Verdict: worse on rung 0 (+0.0051 bits per byte, 8 pairs); multiplier × 0.935 [0.914, 0.959]. Study ladder-2. Before:
old baseline: worse, small on rung 0 (+0.0034 bits per byte, 8 pairs); multiplier × 0.957 [0.947, 0.968]. Study ladder.
"""

from dataclasses import replace

from quern.model.gpt import GPT
from quern.recipe import ResolvedModel
from quern.recipes.gpt import RECIPE as BASELINE


class HalfWindowsGPT(GPT):
    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.windows = [None if kind == "L" else max(1, shape.context // 2) for kind in shape.window_kinds()]


RECIPE = replace(BASELINE, name="half_windows", make_model=HalfWindowsGPT)
