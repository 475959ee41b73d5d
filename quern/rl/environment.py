"""Environments: where questions come from, and what a reply is worth; the built-in ones (docs/rl.md).

A new environment is one Python file that ends in `ENVIRONMENT = Environment(…)`; `quern rl --rl.rewards FILE` uses it.
The check of a program runs in another process than the program (docs/sandbox.md). Spelling and counting ask for words
that no conversation asks for, so a model that has learnt those by heart has something to practise. What `quern
evaluate` asks for is in no environment.
"""

from __future__ import annotations

import atexit
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from quern.data.token_file import fingerprint as marks_of
from quern.eval.task import Item, own_code, question, world_grade
from quern.flags.recipe_file import read_object
from quern.flags.recipe_flags import REWARDS_OF_FILES
from quern.generate.sandbox import Limits, Program, Sandbox
from quern.temporaries import sha256_of
from quern.terminal import ascii_signs
from quern.text.chat import validate
from quern.text.documents import read_rows
from quern.text.sources import find_file
from quern.text.tinyworld import skills
from quern.text.tinyworld.prose import Pen

HELD_OUT_SHARE = 10
"""One question in this many belongs to the split that decides, and is never practised."""
TRIES = 1000
MOST_REWARD = 1e9
"""The largest absolute value of a reward. Squares of differences then stay finite in fp32, too."""
AGAIN = "begin again, under a new --run if steps were taken; with the same file, --resume"
"""Advice for the time after the user has corrected the code."""
LIMITS = Limits(seconds=5.0, cpu_seconds=2.0, memory_megabytes=256)
EXERCISES: dict[str, Callable[[Pen], skills.Exercise]] = {
    "sums": skills.sum_exercise,
    "word_problems": skills.word_problem,
    "spelling": partial(skills.spelling_exercise, words=skills.PRACTICE_WORDS),
    "counting": partial(skills.counting_exercise, words=skills.PRACTICE_WORDS),
}

_COMMONMARK = MarkdownIt("commonmark").disable(["inline", "html_block"])  # <details> hides no program
_PYTHON = re.compile(r"\W*py(?:thon)?[\d.]*(?![\w-])", re.IGNORECASE)
"""The info string of a Python block, such as Python3 or {.python}."""
_KEYWORDS = "async|class|def|for|from|if|import|return|try|while|with"
_STATEMENT = re.compile(rf"^[ \t]*(?:(?:{_KEYWORDS})\b|[\w. ]+=[^=])", re.MULTILINE)


@dataclass(frozen=True)
class Environment:
    """Questions that a program can grade."""

    name: str  # the name of its scores
    ask: Callable[[str], Item]  # (seed) → a question. Equal seeds give equal questions; a seed is any text.
    reward: Callable[[Item, str], float]
    """(item, text of the reply without tool calls) → its reward, between ±`MOST_REWARD`; usually 0 or 1."""
    files: tuple[Path, ...] = ()
    """The files that questions and rewards are read from; a resumed stage must find the same contents."""
    notes: tuple[str, ...] = ()  # lines for the user on how they were read


def fingerprint(environments: Sequence[Environment]) -> str:
    """SHA-256 (hex) of the environments' names and files."""
    return marks_of(*(part for one in environments for part in (one.name, *map(sha256_of, one.files))))


def is_held_out(item: Item) -> bool:
    """Whether a question belongs to the split that decides. Only its text counts, so no seed can mix the splits."""
    return skills.bucket(item.question, HELD_OUT_SHARE) == 0


def reward_of(environment: Environment, item: Item, reply: str) -> float:
    """The reward of a reply to a question. Raises ValueError for one beyond `MOST_REWARD`, or NaN."""
    with own_code(f"reward() of environment '{environment.name}'", AGAIN):
        reward = float(environment.reward(item, reply))
    if not abs(reward) <= MOST_REWARD:  # false for NaN, too
        raise ValueError(f"environment '{environment.name}' gave the reward {reward}: keep to ±{MOST_REWARD:g}")
    return reward


def draw_item(environment: Environment, seed: str, held_out: bool = False) -> Item:
    """The question of a seed, from one of the two splits.

    Raises:
        ValueError: The environment has no question in that split, or its `ask` fails.
    """
    for attempt in range(TRIES):
        with own_code(f"ask() of environment '{environment.name}'", AGAIN):
            item = environment.ask(f"{seed}:{attempt}")
            validate(item.messages)
        if is_held_out(item) == held_out:
            return item
    part = "held out" if held_out else "to practise"
    raise ValueError(f"environment '{environment.name}': no question of {TRIES} seeds is {part}: it needs more of them")


def load_environment(name: str, folder: Path | None = None) -> Environment:
    """The built-in environment of this name, or the ENVIRONMENT of this Python file.

    Args:
        name: A name, or a path that ends in .py.
        folder: Where built-in environments find their files (`rl.data`).

    Raises:
        FileNotFoundError: The folder lacks the file that a built-in environment reads.
        ValueError: There is no such environment, its file is damaged, or the Python file fails.
    """
    require_environment(name)
    if name in BUILT_IN:
        return BUILT_IN[name](name, folder)
    path = Path(name)
    found = read_object(path, "ENVIRONMENT", Environment)[0]
    return replace(found, files=(*found.files, path))


def require_environment(name: str) -> None:
    """Raises ValueError for a name that is neither a built-in environment's nor the path of a Python file."""
    if name not in BUILT_IN and not (name.endswith(".py") and Path(name).is_file()):
        raise ValueError(f"rl.rewards: there is no '{name}': use {', '.join(BUILT_IN)}, or the path of a .py file")


def _of_file(
    name: str,
    file: str,
    folder: Path | None,
    columns: tuple[str, ...],
    read: Callable[[Any], Item],
    reward: Callable[[Item, str], float],
) -> Environment:
    """An environment that asks the rows of a file of the folder (`rl.data`). file: its name without the ending."""
    path, notes = None, list[str]()
    with suppress(FileNotFoundError):  # a folder that is missing or has no rows
        path = folder and find_file(folder, file)
    if path is None:
        there = f", {folder} has none" if folder else ""
        raise FileNotFoundError(f"--rl.rewards {name} reads {file}.jsonl: name its folder with --rl.data{there}")
    items = read_rows(path, name, columns, read, notes.append)
    return Environment(name, lambda seed: random.Random(seed).choice(items), reward, (path,), tuple(notes))


# GSM8K ------------------------------------------------------------------------------------------------------

# A line of its files is {"question": …, "answer": "… #### 1,080"}. Source: Cobbe et al., 2021, "Training Verifiers to
# Solve Math Word Problems", https://arxiv.org/abs/2110.14168. Numbers are compared by value: "10", "10." and "$10.00"
# are equal, and so are "1080", "1,080" and "1 080" with a thin space. A minus sign (U+2212) is read as a hyphen.
_NUMBER = re.compile(r"(?<![\d.])-?\$?(?:\d{1,3}(?:[,\u2009\u202f]\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))")


def last_number(text: str) -> Decimal | None:
    """The value of the last number in a text, or None. A minus is a sign only if no digit is before it: 9-4 has a 4."""
    found, text = None, ascii_signs(text)
    for match in _NUMBER.finditer(text):
        digits = re.sub(r"[,\u2009\u202f$]", "", match.group())
        before = text[match.start() - 1] if match.start() else ""
        found = Decimal(digits.removeprefix("-") if before.isalnum() or before == ")" else digits)
    return found


def is_right_number(item: Item, reply: str) -> bool:
    """Whether the last number of a reply is the answer."""
    number = last_number(reply)
    return number is not None and number == last_number(item.answer)


def word_problem(row: Any) -> Item:
    """The problem of a row. Raises ValueError, KeyError, TypeError or AttributeError for another row."""
    _, mark, answer = (part.strip() for part in row["answer"].rpartition("####"))
    if not mark or last_number(answer) is None:
        raise ValueError("no number after ####")
    return question(row["question"], answer, kind="gsm8k")


def _word_problems(name: str, folder: Path | None) -> Environment:
    return _of_file(name, "train", folder, ("question", "answer"), word_problem, is_right_number)


# Programs ---------------------------------------------------------------------------------------------------


def _programs(name: str, folder: Path | None) -> Environment:
    def reward(item: Item, reply: str) -> bool:
        return open_sandbox(1, LIMITS).run([Program(program_in(reply), item.answer)])[0].passed

    file = folder and folder / f"{name}.jsonl"
    where = file if file and file.is_file() else folder  # before others below the folder, such as an old one
    return _of_file(name, name, where, ("prompt", "check"), _exercise, reward)


def _exercise(row: Any) -> Item:
    if not isinstance(row["check"], str) or not row["check"].strip():
        raise ValueError("the check is no text, or empty: every program would pass")
    return question(row["prompt"], row["check"], kind="programs")


def program_in(reply: str) -> str:
    """The program of a reply: its first fenced block of Python, or all of it if it has no fenced block.

    Blocks follow CommonMark. Without one that is called Python, it is the first that has no tag and looks like Python;
    else the first without a tag; else the first.
    """

    def doubts(block: Token) -> int:
        tag = block.info.strip()
        return 0 if _PYTHON.match(tag) else 3 if tag else 1 if _STATEMENT.search(block.content) else 2

    blocks = [token for token in _COMMONMARK.parse(reply) if token.type == "fence"]
    return min(blocks, key=doubts).content if blocks else reply


@cache
def open_sandbox(workers: int, limits: Limits | None = None) -> Sandbox:
    """This process's sandbox with these limits; it is closed at exit. Raises SandboxError where none works."""
    sandbox = Sandbox(workers=workers, limits=limits)
    atexit.register(sandbox.close)
    return sandbox


# The built-in world -----------------------------------------------------------------------------------------


def _exercises(name: str, folder: Path | None) -> Environment:
    def ask(seed: str) -> Item:
        made = EXERCISES[name](Pen(f"rl:{seed}"))
        return question(made.question, made.answer, kind=name, chance=made.chance)

    return Environment(name, ask, world_grade)


BUILT_IN: dict[str, Callable[[str, Path | None], Environment]] = {
    **dict(zip(REWARDS_OF_FILES, (_word_problems, _programs), strict=True)),
    **dict.fromkeys(EXERCISES, _exercises),
}
