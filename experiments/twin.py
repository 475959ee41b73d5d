"""The baseline under another name.

Hypothesis: what changes nothing makes no difference.
Source: a known answer, to test a rung of the ladder with.
Expected effect: no difference.
Verdict: no difference on rung 0 (+0.0000 bits per byte, 3 pairs); no difference on rung 1 (+0.0000 bits per byte, 3
pairs); multiplier × 1.000 [1.000, 1.000], holds. Study ladder-2. Before: old baseline: no difference on rung 0 (+0.0000
bits per byte, 3 pairs); multiplier × 1.000 [1.000, 1.000]. Study ladder-offset. Before: old baseline: no difference on
rung 0 (+0.0000 bits per byte, 3 pairs); multiplier × 1.000 [1.000, 1.000]. Study ladder.
"""

from dataclasses import replace

from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="twin")
