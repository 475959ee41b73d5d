"""Value embeddings start at N(0, 1), not uniform within ±√(3 / D).

Hypothesis: entries as small as those of the matrices make a table too quiet at first, by about the root of the width.
Source: nanochat's branch `experiment_refactor` (pull request 800, September 2026), by a sweep.
Expected effect: none or slightly better.
Verdict: worse on rung 0 (+0.0057 bits per byte, 8 pairs); multiplier × 0.953 [0.929, 0.977]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0050 bits per byte, 5 pairs); multiplier × 0.972 [0.958, 0.985]. Study ladder.

Shows the seam `init_parameters`.
"""

from dataclasses import replace

from quern.model.gpt import GPT
from quern.model.layers import Draw
from quern.recipes.gpt import RECIPE as BASELINE

OWN_INITIAL_VALUES = ("value_embeddings.*",)


class NormalValuesGPT(GPT):
    def init_parameters(self, draw: Draw) -> None:
        super().init_parameters(draw)
        for table in self.value_embeddings.parameters():
            draw.normal(table, 1.0)


RECIPE = replace(BASELINE, name="value_embeddings_normal", make_model=NormalValuesGPT)
