"""The log's loader: best fit that discards what it crops.

Hypothesis: the tails of long documents are not missed while the data is plentiful.
Source: nanochat's experiment log, 2026-01-13: at a context of 2,048, 34.6% of the tokens are discarded and none are
padding. As there, a document longer than a row is cropped to one row. The default keeps the tails.
Expected effect: no difference as long as no document repeats; worse on a small corpus, a third of which it discards
in each epoch.
Verdict: worse on rung 0 (+0.0418 bits per byte, 3 pairs); multiplier × 0.705 [0.678, 0.735]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0425 bits per byte, 3 pairs); multiplier × 0.787 [0.768, 0.808]. Study ladder.
"""

from dataclasses import replace

from quern.data.batch import Batches
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def make_batches(recipe: Resolved, corpus: Corpus) -> Batches:
    context, tokens, seed = recipe.model.context, recipe.train.batch_tokens, recipe.data_seed
    return Loader(corpus, context, tokens // context, seed, "best-fit", too_long="crop")


RECIPE = replace(BASELINE, name="best_fit_crop", make_batches=make_batches, unused=(*BASELINE.unused, "train.packing"))
