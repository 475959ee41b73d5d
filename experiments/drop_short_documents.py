"""Training documents of fewer than 100 characters are dropped.

Hypothesis: very short documents are noise.
Source: nanochat's experiment log, 2026-01-15, as a repair of Olmo's mixture (CORE fell from 15.5 to 13.8 with that
data).
Expected effect: no difference on clean data.
Verdict: undecided on rung 0 (-0.0033 bits per byte, 8 pairs); multiplier × 1.028 [1.002, 1.053]. Study ladder-2.
Before: old baseline: worse on rung 0 (+0.0070 bits per byte, 8 pairs); multiplier × 0.961 [0.937, 0.985]. Study ladder.
"""

from collections.abc import Iterator
from dataclasses import replace

from quern.recipes.gpt import RECIPE as BASELINE

FEWEST_CHARACTERS = 100


def documents(texts: Iterator[str], split: str) -> Iterator[str]:
    """The validation split keeps all its documents, so that scores stay comparable."""
    return (text for text in texts if split != "train" or len(text) >= FEWEST_CHARACTERS)


RECIPE = replace(BASELINE, name="drop_short_documents", make_documents=documents)
