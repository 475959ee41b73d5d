"""GSM8K: grade-school word problems whose answers are numbers.

A line of its files is {"question": …, "answer": …}; the answer ends in "#### 1,080". Numbers are compared by value:
"10", "10." and "$10.00" are equal, and so are "1080", "1,080" and "1 080" with a thin space. A minus sign (U+2212) is
read as a hyphen.
Source: Cobbe et al., 2021, "Training Verifiers to Solve Math Word Problems", https://arxiv.org/abs/2110.14168.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from quern.eval.task import Item, question
from quern.terminal import ascii_signs

_NUMBER = re.compile(r"(?<![\d.])-?\$?(?:\d{1,3}(?:[,\u2009\u202f]\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))")


def last_number(text: str) -> Decimal | None:
    """The value of the last number in a text, or None. A minus is a sign only if no digit is before it: 9-4 has a 4."""
    found, text = None, ascii_signs(text)
    for match in _NUMBER.finditer(text):
        digits = re.sub(r"[,\u2009\u202f$]", "", match.group())
        before = text[match.start() - 1] if match.start() else ""
        found = Decimal(digits.removeprefix("-") if before.isalnum() or before == ")" else digits)
    return found


def is_right(item: Item, reply: str) -> bool:
    """Whether the last number of a reply is the answer."""
    number = last_number(reply)
    return number is not None and number == last_number(item.answer)


def problem(row: Any) -> Item:
    """The problem of a row. Raises ValueError, KeyError, TypeError or AttributeError for another row."""
    _, mark, answer = (part.strip() for part in row["answer"].rpartition("####"))
    if not mark or last_number(answer) is None:
        raise ValueError("no number after ####")
    return question(row["question"], answer, kind="gsm8k")
