"""Rows are cut from documents put end to end.

Hypothesis: rows that start with BOS are better, since every token sees the start of its document.
Source: nanochat's experiment log, 2026-01-13: rows that start in mid-document make the loss look worse and may
confuse the model; this is the loader from before.
Expected effect: slightly worse.
Changed: 2026-11-30T23:20, a batch had consecutive rows of the stream; now the rows of a chunk are shuffled.
Verdict: worse on rung 0 (+0.0310 bits per byte, 5 pairs). Study ladder-stream. Before the change: worse on rung 0
(+0.1202 bits per byte, 3 pairs); multiplier × 0.374 [0.354, 0.399]. Study ladder-2. Before: old baseline: worse on rung
0 (+0.0885 bits per byte, 3 pairs); multiplier × 0.611 [0.589, 0.635]. Study ladder.
"""

from dataclasses import replace

from quern.recipe import TrainRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="stream", train=TrainRecipe(packing="stream"))
