"""Reads the TOML files of this folder: the facts, words, wordings and plots of the tinyworld."""

import re
import tomllib
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
