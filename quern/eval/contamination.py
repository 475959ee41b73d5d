"""Contamination: the questions of a task that share a long passage with the training text.

A question is contaminated if any run of 13 words in it is also in a training document (text/clean/steps.py). The
training text is read once, document by document; memory grows with the questions only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from quern.eval.score import SINGLE
from quern.eval.task import Item
from quern.mesh import ProcessGroup
from quern.text.clean.steps import Passages

_OPTION = re.compile(r"^([A-Z])\) (.*)$", re.MULTILINE)


def find_contaminated(questions: Sequence[str], documents: Iterable[str]) -> list[bool]:
    """Whether each question, a text with its answer, shares a run of `WORDS` words with a document."""
    known, found = Passages(questions), [False] * len(questions)
    for document in documents:
        for number in known.found_in(document):
            found[number] = True
    return found


def passage(item: Item) -> str:
    """The text of an item that is looked for: its question, without lettered options, and its answer."""
    options = dict(_OPTION.findall(item.question))
    return f"{_OPTION.sub('', item.question)} {options.get(item.answer, item.answer)}"


def contaminated_shares(
    passages: Mapping[str, Sequence[str]], documents: Iterable[str], group: ProcessGroup = SINGLE
) -> dict[str, float]:
    """The share of each task's questions that share a run of words with the training text.

    Args:
        passages: Task → the texts of its questions.
        documents: This rank's part of the training text; read once, for all tasks.
        group: The ranks that read a part each.
    """
    own = find_contaminated([text for texts in passages.values() for text in texts], documents)
    found = map(any, zip(*group.gather_objects(own), strict=True))
    shares = {task: [next(found) for _ in texts] for task, texts in passages.items()}
    return {task: sum(own) / len(own) for task, own in shares.items() if own}
