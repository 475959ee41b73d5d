"""An embedding of each pair of tokens before every block, with rows that decay: `model.bigrams`.

Hypothesis: a pair's row forgets between two of its uses, so that the table keeps pairs that are frequent; without decay
it learns by heart a text that is read several times (bigram_early.py).
Source: ours. The table is that of bigram.py. The shares of rare pairs shrink most, as in smoothed counts (Kneser and
Ney 1995).
Expected effect: better at equal steps.
Verdict: better on rung 0 (-0.0516 bits per byte, 3 pairs); better on rung 1 (-0.0497 bits per byte, 3 pairs);
multiplier × 1.597 [1.552, 1.644], unclear. Study ladder-2.

On English that is read 4.3 to 5.4 times, at depths 2 and 3, it is better by 0.009 to 0.028 bits per byte
(docs/ladder.md); bigram_early.py became worse there in the third reading.
"""

from dataclasses import replace

from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="bigram_decay", model=replace(BASELINE.model, bigrams=True))
