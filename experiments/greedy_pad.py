"""Documents in order; a row is padded when the next document does not fit.

Hypothesis: whole documents are worth the padding.
Source: nanochat's experiment log, 2026-01-13: 22% of the slots are padding, and 23% of the tokens are cropped at a
context of 2,048. As there, a document longer than a row is cropped to one row.
Expected effect: worse at equal time: a fifth of the slots compute nothing.
Verdict: worse on rung 0 (+0.0456 bits per byte, 3 pairs); multiplier × 0.683 [0.657, 0.713]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0432 bits per byte, 3 pairs); multiplier × 0.785 [0.756, 0.814]. Study ladder.

The FLOPs axis counts tokens that are trained on, so padding costs nothing there.
"""

from dataclasses import replace

from quern.data.batch import Batches
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def make_batches(recipe: Resolved, corpus: Corpus) -> Batches:
    context, tokens, seed = recipe.model.context, recipe.train.batch_tokens, recipe.data_seed
    return Loader(corpus, context, tokens // context, seed, "greedy-pad", too_long="crop")


RECIPE = replace(BASELINE, name="greedy_pad", make_batches=make_batches, unused=(*BASELINE.unused, "train.packing"))
