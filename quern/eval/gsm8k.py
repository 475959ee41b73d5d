"""GSM8K: grade-school word problems whose answers are numbers.

A line of its files is {"question": …, "answer": …}; the answer ends in "#### 1,080". Numbers are compared by value:
"10", "10." and "$10.00" are equal, and so are "1080", "1,080" and "1 080" with a thin space. A minus sign (U+2212) is
read as a hyphen.
Source: Cobbe et al., 2021, "Training Verifiers to Solve Math Word Problems", https://arxiv.org/abs/2110.14168.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from quern.eval.task import Item, question
from quern.text.formats import converted
from quern.text.printable import ascii_signs

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


def _problem(row: Any, path: Path) -> Item:
    try:
        return problem(row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'each line is {{"question": …, "answer": "… #### 12"}} ({error})') from error


def find_gsm8k(folder: Path, split: str) -> Path:
    """The file of a split, "train" or "test": <split>.jsonl or <split>.jsonl.gz, anywhere below the folder.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: There are several.
    """
    names = {f"{split}.jsonl", f"{split}.jsonl.gz"}
    paths = sorted(path for path in folder.rglob(f"{split}.jsonl*") if path.name in names)
    if not paths:
        raise FileNotFoundError(f"{folder} has no GSM8K file {split}.jsonl or {split}.jsonl.gz: name its folder")
    if len(paths) > 1:
        raise ValueError(f"{folder} has several files {split}.jsonl: {', '.join(map(str, paths))}; name one's folder")
    return paths[0]


def read_gsm8k(folder: Path, split: str, log: Callable[[str], None] | None = None) -> list[Item]:
    """The problems of a split. log: takes lines on malformed lines that are skipped; see `converted`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: There are several, or too many lines are no problem.
        OSError: The file cannot be read to its end.
    """
    path = find_gsm8k(folder, split)
    items = [item for item, _, _ in converted([path], ("question", "answer"), _problem, log)]
    if not items:
        raise ValueError(f"{path} has no problems")
    return items
