"""The baseline under another name.

Hypothesis: what changes nothing makes no difference.
Source: a known answer, to test a rung of the ladder with.
Expected effect: no difference.
Verdict: not yet measured.
"""

from dataclasses import replace

from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="twin")
