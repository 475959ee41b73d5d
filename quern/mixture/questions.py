"""Rows of question sets as conversations.

    GSM8K           {"question": "…", "answer": "…<<48/2=24>>24…\n#### 72"}
    multiple choice {"question": "…", "choices": ["…", …], "answer": 2 or "C"}, as MMLU's rows

A calculation of GSM8K, <<expression=result>>, becomes a call of quern's calculator with the calculator's own output. A
mark whose result the calculator does not find (rounded, wrong, or no arithmetic) is left out, and the text around it
stays: in a reply, the calculator would contradict the text that follows. Any other record is one of the shapes of
text/conversations.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from quern.generate.tools import ToolError, calculate
from quern.text import conversations
from quern.text.chat import ContentPart, Message

ROW = ("question", "choices", "answer")
KEYS = (*conversations.KEYS, *ROW)
"""The keys that are read from a record."""
_MARK = re.compile(r"<<([^<>]*)=([^<>=]*)>>")


def to_messages(record: Any, ignored: Counter[str] | None = None) -> list[Message]:
    """Converts a row of a question set, or a record of another shape, to a conversation; see conversations.py.

    Raises:
        ValueError: The record has none of the shapes.
    """
    if isinstance(record, Mapping) and not any(
        record.get(key) for key in (*conversations.LISTS, *conversations.ALPACA)
    ):
        question, choices, answer = (record.get(key) for key in ROW)
        rest = {key: value for key, value in record.items() if key not in ROW}
        if isinstance(question, str) and isinstance(choices, list):
            turns = _exchange(multiple_choice(question, choices), _letter(answer, choices))
            return conversations.to_messages({**rest, "messages": turns}, ignored)
        if isinstance(question, str) and isinstance(answer, str):
            return conversations.to_messages({**rest, "messages": _exchange(question, word_problem(answer))}, ignored)
    return conversations.to_messages(record, ignored)


def multiple_choice(question: str, choices: Sequence[str]) -> str:
    """A question with lettered options; the reply is the letter."""
    return "\n".join(
        [question, *(f"{letter}) {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))]
    )


def word_problem(answer: str) -> list[ContentPart]:
    """The reply to a problem of GSM8K: text, with calls of the calculator and their outputs."""
    parts: list[ContentPart] = []
    text, end = "", 0
    for mark in _MARK.finditer(answer):
        text, end = text + answer[end : mark.start()], mark.end()
        output = _output(mark[1], mark[2])
        if output is not None:
            if text:
                parts.append({"type": "text", "text": text})
            parts += [{"type": "tool", "text": mark[1].strip()}, {"type": "output", "text": output}]
            text = ""
    parts.append({"type": "text", "text": text + answer[end:]})
    return parts


def _output(expression: str, stated: str) -> str | None:
    """The calculator's output for the expression; None unless it is the number that the row states."""
    try:
        found = calculate(expression.strip())
        return found if found == calculate(stated.replace("$", "")) else None
    except ToolError:
        return None


def _letter(answer: Any, choices: Sequence[str]) -> str:
    letters = ascii_uppercase[: len(choices)]
    if isinstance(answer, int) and 0 <= answer < len(letters):
        return letters[answer]
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        return answer
    raise ValueError(
        f"the answer is {answer!r}: give the number of one of the {len(choices)} choices, from 0, or its letter"
    )


def _exchange(question: str, reply: str | list[ContentPart]) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
