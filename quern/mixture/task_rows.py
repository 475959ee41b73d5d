"""Test rows of tasks, by hash, and the conversations that hold one of them.

docs/fine-tuning.md, "Test rows are refused", says what is compared.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quern.mixture.sources import multiple_choice
from quern.text.chat import Message, parts
from quern.text.documents import converted, place
from quern.text.sources import OF_ROWS, list_source
from quern.text.tinyworld import corpus

SHORTEST = 8
"""A question of so many words is found anywhere in a message, a shorter one only as a whole message of the user."""
BUILT_IN_QUESTIONS = 500
"""Held-out questions of each kind of the built-in world that are compared: the first ones of the run's seed."""
QUESTION_KEYS = ("question", "query", "prompt", "context_options", "context", "messages")
"""The keys that can hold the question of a test row; the first one that a row has counts."""
TRAINING_FILE = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)")
_WORD = re.compile(r"\w+|[+\-*/=<>^%×÷−]")
_LABEL = re.compile(r"\s*(question|problem)\s*:\s*", re.IGNORECASE)


class TaskRows:
    """A set of test rows. fingerprint: SHA-256 (hex) of all questions."""

    def __init__(self) -> None:
        self._short: dict[bytes, str] = {}
        self._long: dict[str, dict[int, dict[bytes, str]]] = {}  # first words → number of words → digest → row
        self._digest = hashlib.sha256()

    @property
    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def add(self, question: str, row: str) -> None:
        """Adds a question. row: the row and the task, for messages."""
        words = _words(_LABEL.sub("", question, count=1) if _LABEL.match(question) else question)
        if not words:
            return
        digest = _hash(words)
        self._digest.update(digest)
        if len(words) < SHORTEST:
            self._short.setdefault(digest, row)
        else:
            self._long.setdefault(" ".join(words[:SHORTEST]), {}).setdefault(len(words), {}).setdefault(digest, row)

    def read(self, folder: Path, task: str) -> None:
        """Adds the rows of the test files in a folder. Files with "train" in their name are not read. Raises as
        `list_source`, and ValueError for a file that is damaged or a row that has no question."""
        for path in list_source(folder, OF_ROWS).files:
            if TRAINING_FILE.search(path.name.lower()):
                continue
            for found, _, record in converted([path], (*QUESTION_KEYS, "choices"), lambda row: [*_questions(row)]):
                for question in found:
                    self.add(question, f"{place(path, record)} ({task})")

    def find(self, messages: Sequence[Message]) -> str | None:
        """The test row that a conversation holds; None if it holds none."""
        for message in messages:
            words = _words(" ".join(part["text"] for part in parts(message)))
            short = len(words) < SHORTEST and message["role"] == "user"
            if short and (row := self._short.get(_hash(words))):
                return row
            for at in range(len(words) - SHORTEST + 1):
                for size, rows in self._long.get(" ".join(words[at : at + SHORTEST]), {}).items():
                    if at + size <= len(words) and (row := rows.get(_hash(words[at : at + size]))):
                        return row
        return None


def built_in_rows(rows: TaskRows, seed: int) -> None:
    """Adds the held-out questions of the built-in world."""
    for kind in (kind for kind in corpus.QUESTION_KINDS if kind != "small_talk"):  # anyone may say hello
        for number, question in enumerate(corpus.questions(seed, kind, BUILT_IN_QUESTIONS)):
            rows.add(question.question, f"question {number + 1} of tinyworld/{kind}")


def _questions(value: Any) -> Iterator[str]:
    found = next((value[key] for key in QUESTION_KEYS if value.get(key)), None) if isinstance(value, Mapping) else None
    if isinstance(found, str):
        options = value.get("choices")
        if not isinstance(options, list) or len(_words(found)) >= SHORTEST:
            yield found
        if isinstance(options, list):
            yield multiple_choice(found, options)
    elif isinstance(found, list) and found:
        for one in found:
            content = one.get("content") if isinstance(one, Mapping) and one.get("role") == "user" else one
            if isinstance(content, str) and (content is one or len(_words(content)) >= SHORTEST):
                yield content
    else:
        raise ValueError(f"no test row: it has none of {', '.join(QUESTION_KEYS)}")


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _hash(words: Iterable[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=16).digest()
