"""Baseline: the `gpt` recipe as it is, at the size at which ideas are compared.

Copy this file to begin an idea; README.md in this folder lists the ideas and their verdicts.
"""

from dataclasses import replace

from quern.recipes.gpt import RECIPE as GPT_RECIPE

RECIPE = replace(GPT_RECIPE, name="baseline")
