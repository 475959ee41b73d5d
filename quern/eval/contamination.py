"""Which questions of a task share a long passage with the training text.

A question is contaminated if any run of 13 words in it is also in a training document: the rule of GPT-3 (Brown et
al., 2020, https://arxiv.org/abs/2005.14165, appendix C). Words are compared in lower case without punctuation. A
question with fewer words counts if all of them, in order, are in a document. The training text is read once, document
by document; memory grows with the questions only.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from quern.eval.task import Item
from quern.mesh import ProcessGroup

WORDS = 13
LEAST_WORDS = 5
"""Shorter questions are in every large text by chance, and are never called contaminated."""

_WORD = re.compile(r"\w+")
_OPTION = re.compile(r"^([A-Z])\) (.*)$", re.MULTILINE)


def find_contaminated(questions: Sequence[str], documents: Iterable[str], words: int = WORDS) -> list[bool]:
    """Whether each question shares a run of `words` words with a document.

    Args:
        questions: The text of each question, with its answer.
        documents: The training text; read once.
        words: Length of a run.
    """
    wanted: dict[int, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, question in enumerate(questions):
        split = _split(question)
        size = min(words, len(split))
        if size >= LEAST_WORDS:
            for run in _runs(split, size):
                wanted[size][_digest(run)].append(number)
    found = [False] * len(questions)
    for document in documents:
        split = _split(document)
        for size, known in wanted.items():
            for run in _runs(split, size):
                for number in known.get(_digest(run), ()):
                    found[number] = True
    return found


def passage(item: Item) -> str:
    """The text of an item that is looked for: its question, without lettered options, and its answer."""
    options = dict(_OPTION.findall(item.question))
    return f"{_OPTION.sub('', item.question)} {options.get(item.answer, item.answer)}"


def contaminated_shares(
    passages: Mapping[str, Sequence[str]], documents: Iterable[str], group: ProcessGroup | None = None
) -> dict[str, float]:
    """The share of each task's questions that share a run of words with the training text.

    Args:
        passages: Task → the texts of its questions.
        documents: The training text, or this rank's part of it; read once, for all tasks.
        group: The ranks that read a part each; None is a single process.
    """
    own = find_contaminated([text for texts in passages.values() for text in texts], documents)
    found = iter(own if group is None else map(any, zip(*group.gather_objects(own), strict=True)))
    shares = {task: [next(found) for _ in texts] for task, texts in passages.items()}
    return {task: sum(own) / len(own) for task, own in shares.items() if own}


def _split(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: Sequence[str], size: int) -> Iterable[str]:
    return (" ".join(words[first : first + size]) for first in range(len(words) - size + 1))


def _digest(run: str) -> bytes:
    return hashlib.blake2b(run.encode("utf-8"), digest_size=8).digest()
