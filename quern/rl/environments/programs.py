"""Programs to write in Python. The reward is 1 if the program in the reply passes its check in the sandbox, else 0.

The file programs.jsonl of `rl.data` has a line for each exercise: {"prompt": "Write a function add(a, b) …", "check":
"assert program.add(2, 3) == 5"}. The check runs in another process than the program (docs/sandbox.md).
"""

from __future__ import annotations

import atexit
import random
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from quern.eval.task import Item, question
from quern.generate.sandbox import Limits, Program, Sandbox
from quern.rl.environment import Environment
from quern.text.formats import read_rows

NAMES = ("programs",)
FILE = "programs.jsonl"
LIMITS = Limits(seconds=5.0, cpu_seconds=2.0, memory_megabytes=256)

_COMMONMARK = MarkdownIt("commonmark").disable(["inline", "html_block"])  # <details> hides no program
_PYTHON = re.compile(r"\W*py(?:thon)?[\d.]*(?![\w-])", re.IGNORECASE)
"""The info string of a Python block, such as Python3 or {.python}."""
_KEYWORDS = "async|class|def|for|from|if|import|return|try|while|with"
_STATEMENT = re.compile(rf"^[ \t]*(?:(?:{_KEYWORDS})\b|[\w. ]+=[^=])", re.MULTILINE)


def environment(name: str, folder: Path | None) -> Environment:
    """Raises ValueError if the file is missing, or a line of it is not an exercise."""
    path = folder / FILE if folder is not None else None
    if path is None or not path.is_file():
        raise ValueError(f"rl.rewards {name}: name the folder with {FILE} by --rl.data")
    notes: list[str] = []
    exercises = read_rows(path, NAMES[0], ("prompt", "check"), _exercise, notes.append)
    return Environment(name, partial(_ask, exercises), _reward, (path,), tuple(notes))


def _exercise(row: Any) -> tuple[str, str]:
    return str(row["prompt"]), str(row["check"])


def program_in(reply: str) -> str:
    """The program of a reply: its first fenced block of Python, or all of it if it has no fenced block.

    Blocks are those of CommonMark. Without one that is called Python, it is the first that has no tag and looks like
    Python; else the first without a tag; else the first.
    """

    def doubts(block: Token) -> int:
        tag = block.info.strip()
        return 0 if _PYTHON.match(tag) else 3 if tag else 1 if _STATEMENT.search(block.content) else 2

    blocks = [token for token in _COMMONMARK.parse(reply) if token.type == "fence"]
    return min(blocks, key=doubts).content if blocks else reply


def _ask(exercises: list[tuple[str, str]], seed: str) -> Item:
    prompt, check = random.Random(seed).choice(exercises)
    return question(prompt, check, kind="programs")


def _reward(item: Item, reply: str) -> float:
    return float(open_sandbox(1, LIMITS).run([Program(program_in(reply), item.answer)])[0].passed)


@cache
def open_sandbox(workers: int, limits: Limits | None = None) -> Sandbox:
    """This process's sandbox with these limits; it is closed at exit. Raises SandboxError where none works."""
    sandbox = Sandbox(workers=workers, limits=limits)
    atexit.register(sandbox.close)
    return sandbox
