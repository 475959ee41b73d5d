"""Documents are cleaned: no duplicates, none that are short or not like prose.

Hypothesis: duplicates and noise cost steps and teach nothing, so at equal steps the loss on clean text falls faster.
Source: Rae et al., 2021 (https://arxiv.org/abs/2112.11446) for the quality rules; Lee et al., 2021
(https://arxiv.org/abs/2107.06499) for duplicates.
Expected effect: none on text that is clean already, such as the built-in world's.
Verdict: undecided on rung 0 (-0.0025 bits per byte, 8 pairs); undecided on rung 1 (-0.0028 bits per byte, 3 pairs);
multiplier × 1.027 [1.000, 1.057], unclear. Study ladder-2. Before: old baseline: undecided on rung 0 (+0.0031 bits per
byte, 8 pairs); multiplier × 0.983 [0.951, 1.015]. Study ladder.

Two more steps, which need more than this file: `steps.near_duplicates()` (the extra `data`), and
`steps.benchmark_questions(passages)`, which removes documents with the questions that you will evaluate with.
"""

from collections.abc import Iterator
from dataclasses import replace

from quern.recipes.gpt import RECIPE as BASELINE
from quern.text.clean import steps
from quern.text.clean.steps import Cleaned

FEWEST_CHARACTERS, FEWEST_WORDS = 40, 8


def documents(texts: Iterator[str], split: str) -> Iterator[str]:
    """The validation split keeps all its documents, so that scores stay comparable."""
    if split != "train":
        return texts
    return Cleaned(texts, [steps.length(FEWEST_CHARACTERS), steps.exact_duplicates(), steps.quality(FEWEST_WORDS)])


RECIPE = replace(BASELINE, name="clean_text", make_documents=documents)
