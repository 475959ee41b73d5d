"""Grouped queries: all query heads share one head of keys and values.

Hypothesis: fewer key-value heads save time and cache, at some loss of quality.
Source: Shazeer 2019 (arXiv 1911.02150); with several groups: Ainslie et al. 2023 (arXiv 2305.13245). nanochat's
experiment log keeps as many key-value heads as heads.
Expected effect: worse at equal steps; the cache is smaller.
Verdict: worse on rung 0 (+0.0227 bits per byte, 3 pairs); multiplier × 0.880 [0.837, 0.929]. Study ladder-2. Before:
old baseline: worse, small on rung 0 (+0.0042 bits per byte, 8 pairs); multiplier × 1.040 [1.024, 1.057]. Study ladder.

The value embeddings shrink with the key-value heads. The lowest rung has three query heads.
"""

from dataclasses import replace

from quern.recipe import ModelRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="grouped_queries", model=ModelRecipe(kv_heads=1))
