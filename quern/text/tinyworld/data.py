"""Reads the TOML files of this folder: the facts, words, wordings and plots of the tinyworld. Training text contains
QUESTIONS only; HELD_OUT_QUESTIONS are for the evaluation.
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@cache
def table(name: str) -> dict[str, Any]:
    """The contents of NAME.toml."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def wordings(name: str) -> dict[str, Any]:
    """The contents of NAME.toml, with the readings (see `lines`) in place of every string."""
    return _readings(table(name))


def _readings(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _readings(inner) for key, inner in value.items()}
    return tuple(map(_readings, value)) if isinstance(value, list) else lines(value)


def words(block: str) -> tuple[str, ...]:
    return tuple(block.split())


def expand(template: str) -> list[str]:
    """All readings of a template: `[a|b] c` reads `a c` and `b c`."""
    found = _CHOICE.search(template)
    if found is None:
        return [re.sub(r"  +", " ", template).strip(" ")]
    head, tail = template[: found.start()], template[found.end() :]
    return [reading for option in found.group(1).split("|") for reading in expand(head + option + tail)]


def lines(block: str) -> tuple[str, ...]:
    """All readings of a block of templates, one template a line."""
    return tuple(reading for line in block.splitlines() if line for reading in expand(line))


_TABLE = table("words")
WORDS, THINGS, ADJECTIVES, MOODS = (words(_TABLE[key]) for key in ("words", "things", "adjectives", "moods"))
DOINGS = lines(_TABLE["doings"])
OPPOSITES = tuple(tuple(pair.split("/")) for pair in words(_TABLE["opposites"]))
CATALOGUE: dict[str, tuple[str, ...]] = {category: words(block) for category, block in _TABLE["catalogue"].items()}

_PLOTS, _PLOT_WORDINGS = table("plots"), wordings("plots")
CHANCES: dict[str, tuple[str, ...]] = {"adj": ADJECTIVES, "mood": MOODS} | {
    field: _PLOT_WORDINGS["spot"] if field == "spot" else words(_PLOTS[field])
    for field in "vessel day season weather time spot small thing number month".split()
}
"""Fields of templates that have nothing to do with a character, in the order in which they are picked."""
DAYS, MONTHS = CHANCES["day"], CHANCES["month"]
STORY_OPENINGS, ENDINGS, BRIDGES, MORALS = (_PLOT_WORDINGS[key] for key in "openings endings bridges morals".split())
PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = tuple(plot["scenes"] for plot in _PLOT_WORDINGS["plots"])

Wordings = Mapping[str, tuple[str, ...]]
_WORDINGS: dict[str, Wordings] = wordings("wordings")
QUESTIONS, HELD_OUT_QUESTIONS, DIRECT_QUESTIONS, FOLLOW_UPS, ANSWERS, STATEMENTS, SELF_STATEMENTS, TAILS = (
    _WORDINGS[key]
    for key in (
        "questions held_out_questions direct_questions follow_ups answers statements self_statements tails".split()
    )
)
OPENINGS, CLOSINGS, EPITHETS = (table("wordings")[key] for key in ("openings", "closings", "epithets"))
