"""Documents in order, each cropped at the end of its row.

Hypothesis: the simplest loader without padding is good enough.
Source: nanochat's experiment log, 2026-01-13: 39.4% of the tokens are discarded at a context of 2,048. As there, a
document longer than a row is cropped to one row.
Expected effect: worse on a small corpus, since it discards most.
Verdict: worse on rung 0 (+0.0474 bits per byte, 3 pairs); multiplier × 0.673 [0.634, 0.717]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0427 bits per byte, 3 pairs); multiplier × 0.787 [0.756, 0.820]. Study ladder.
"""

from dataclasses import replace

from quern.data.batch import Batches
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def make_batches(recipe: Resolved, corpus: Corpus) -> Batches:
    context, tokens, seed = recipe.model.context, recipe.train.batch_tokens, recipe.data_seed
    return Loader(corpus, context, tokens // context, seed, "greedy-crop", too_long="crop")


RECIPE = replace(BASELINE, name="greedy_crop", make_batches=make_batches, unused=(*BASELINE.unused, "train.packing"))
