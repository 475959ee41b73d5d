"""The files of chat tasks, and their rows as items.

    choice     {"question": …, "choices": {"text": […], "label": […]}, "answerKey": "B"}     ARC
               {"question": …, "choices": […], "answer": 2}                                  MMLU
               {"query": …, "choices": […], "gold": 2}                                       CORE's files
    gsm8k      {"question": …, "answer": "… #### 12"}
    humaneval  {"task_id": …, "prompt": …, "entry_point": …, "canonical_solution": …, "test": …}

Options get the letters A, B, …, and the answer is a letter, as `quern sft` teaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any

from quern.eval.gsm8k import problem
from quern.eval.task import Item, question
from quern.mixture.questions import multiple_choice
from quern.text.formats import read_rows

COLUMNS = ("question", "query", "choices", "answerKey", "answer", "gold", "prompt", "entry_point", "test")
COLUMNS = (*COLUMNS, "task_id", "canonical_solution")
LABEL = "Question: "
"""CORE's files begin their questions with it."""


@dataclass(frozen=True)
class ProgramItem(Item):
    """A function to write. answer: a right body; question: the beginning, with the docstring; entry_point: the
    function's name; test: source that defines `check(function)`."""

    entry_point: str = ""
    test: str = ""


def read_items(path: Path, name: str) -> list[Item]:
    """Reads the items of a task's file, in the file's order. Raises as `read_rows`."""
    return read_rows(path, name, COLUMNS, lambda row: READERS.get(name, _choice)(name, row))


def _choice(name: str, row: Any) -> Item:
    asked = row["question"] if row.get("question") is not None else row["query"]
    choices = row["choices"]
    if isinstance(choices, Mapping):
        options, labels, key = choices["text"], list(choices["label"]), row["answerKey"]
        if key not in labels:
            raise ValueError(f"answerKey {key!r} is none of its labels, {', '.join(map(str, labels))}")
        gold = labels.index(key)
    else:
        options, gold = choices, row["gold"] if row.get("gold") is not None else row["answer"]
        if isinstance(gold, str) and len(gold) == 1:
            gold = ascii_uppercase.find(gold)
    if not isinstance(options, list) or not all(isinstance(text, str) and text for text in (asked, *options)):
        raise ValueError("its question or an option is no text, or empty")
    if type(gold) is not int or not (2 <= len(options) <= len(ascii_uppercase) and 0 <= gold < len(options)):
        raise ValueError(f"the answer {gold!r} is none of its {len(options)} options")
    letters = tuple(ascii_uppercase[: len(options)])
    return question(multiple_choice(asked.removeprefix(LABEL), options), letters[gold], letters, name)


def _problem(name: str, row: Any) -> Item:
    return problem(row)


def _program(name: str, row: Any) -> Item:
    texts = [row[key] for key in ("prompt", "canonical_solution", "entry_point", "test")]
    if not all(isinstance(text, str) for text in texts) or not texts[2].isidentifier():
        raise ValueError("its prompt, canonical_solution or test is no text, or its entry_point no name")
    prompt, solution, entry_point, test = texts
    return ProgramItem(name, [{"role": "user", "content": prompt}], solution, entry_point=entry_point, test=test)


READERS: Mapping[str, Callable[[str, Any], Item]] = MappingProxyType({"gsm8k": _problem, "humaneval": _program})
