"""The tinyworld itself: the words and wordings of this folder's TOML files, and its facts: who lives in the valley, and
eight relations from a character to one word.

Training text asks in the wordings `questions` only; `held_out_questions` are for the evaluation. The cast is 72
characters in 12 villages. A constant seed deals the values of facts.toml to the characters, so every seed of the corpus
describes the same world. Templates take their fields from `FIELDS`.
"""

import random
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

WORLD_SEED = "quern tinyworld, first edition"
RELATIONS = ("kind", "home", "work", "friend", "food", "colour", "hobby", "treasure")
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


_WORDS = table("words")
WORDS, THINGS, ADJECTIVES, MOODS = (words(_WORDS[key]) for key in ("words", "things", "adjectives", "moods"))
DOINGS = lines(_WORDS["doings"])
OPPOSITES = tuple(tuple(pair.split("/")) for pair in words(_WORDS["opposites"]))
CATALOGUE: dict[str, tuple[str, ...]] = {category: words(block) for category, block in _WORDS["catalogue"].items()}

_PLOTS, _PLOT_WORDINGS = table("plots"), wordings("plots")
CHANCES: dict[str, tuple[str, ...]] = {"adj": ADJECTIVES, "mood": MOODS} | {
    field: _PLOT_WORDINGS["spot"] if field == "spot" else words(_PLOTS[field])
    for field in "vessel day season weather time spot small thing number month".split()
}
"""Fields of templates that have nothing to do with a character, in the order in which they are picked."""
DAYS, MONTHS = CHANCES["day"], CHANCES["month"]
STORY_OPENINGS, ENDINGS, BRIDGES, MORALS = (_PLOT_WORDINGS[key] for key in "openings endings bridges morals".split())
PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = tuple(plot["scenes"] for plot in _PLOT_WORDINGS["plots"])

WORDINGS: dict[str, Mapping[str, tuple[str, ...]]] = wordings("wordings")  # kind of wording → relation → the wordings
OPENINGS, CLOSINGS, EPITHETS = (table("wordings")[key] for key in ("openings", "closings", "epithets"))

_FACTS = table("facts")
KINDS, FOODS, COLOURS, HOBBIES, TREASURES = (
    words(_FACTS["values"][relation]) for relation in ("kind", "food", "colour", "hobby", "treasure")
)
HOMES: Mapping[str, tuple[str, str]] = {home: tuple(facts) for home, facts in _FACTS["homes"].items()}
WORKS: Mapping[str, tuple[str, str, str]] = {work: tuple(facts) for work, facts in _FACTS["works"].items()}


@dataclass(frozen=True)
class Character:
    """One inhabitant. Every fact is a single word; `friend` is a name, and friendship is mutual."""

    name: str
    she: bool
    kind: str
    home: str
    work: str
    friend: str
    food: str
    colour: str
    hobby: str
    treasure: str

    def fact(self, relation: str) -> str:
        """The value of one of RELATIONS."""
        return getattr(self, relation)


def _make_cast() -> tuple[Character, ...]:
    rng = random.Random(WORLD_SEED)
    people = [(name, she) for she, key in ((False, "he"), (True, "she")) for name in words(_FACTS["names"][key])]
    rng.shuffle(people)
    names = [name for name, _ in people]
    pairs = list(range(len(names)))
    rng.shuffle(pairs)
    friend = {}
    for left, right in zip(pairs[0::2], pairs[1::2], strict=True):
        friend[names[left]], friend[names[right]] = names[right], names[left]
    values = (KINDS, tuple(HOMES), tuple(WORKS), FOODS, COLOURS, HOBBIES, TREASURES)
    # Each value as often as the others, so that all blind guesses are alike.
    columns = [[*islice(cycle(column), len(people))] for column in values]
    for column in columns:
        rng.shuffle(column)
    cast = [
        Character(name, she, kind, home, work, friend[name], *rest)
        for (name, she), kind, home, work, *rest in zip(people, *columns, strict=True)
    ]
    return tuple(sorted(cast, key=lambda character: character.name))


CAST = _make_cast()
CHARACTERS: Mapping[str, Character] = {character.name: character for character in CAST}
VALUES: Mapping[str, tuple[str, ...]] = {
    relation: tuple(sorted({character.fact(relation) for character in CAST})) for relation in RELATIONS
}


def a(noun: str) -> str:
    """The noun after its indefinite article (every word of the world sounds as it is spelled)."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def blind_guess(relation: str) -> float:
    """Chance of guessing a fact: the share of the relation's most common value."""
    facts = [character.fact(relation) for character in CAST]
    return max(facts.count(value) for value in VALUES[relation]) / len(facts)


def fields(character: Character, prefix: str = "") -> dict[str, str]:
    """The fields of templates for a character: facts, pronouns, and words that belong to the facts."""
    fact = {relation: character.fact(relation) for relation in RELATIONS}
    he, him, his, himself = ("she", "her", "her", "herself") if character.she else ("he", "him", "his", "himself")
    made = fact | {"name": character.name, "he": he, "him": him, "his": his, "himself": himself}
    made |= {f"a_{relation}": a(fact[relation]) for relation in ("kind", "work", "treasure", "colour")}
    made |= {"He": upper_first(he), "His": upper_first(his)}
    made |= {upper_first(relation): upper_first(fact[relation]) for relation in ("food", "hobby")}
    made["lies"], made["known"] = HOMES[character.home]
    made["does"], made["place"], made["things"] = WORKS[character.work]
    made["friend_kind"] = CHARACTERS[character.friend].kind
    return {prefix + key: value for key, value in made.items()}


FIELDS: Mapping[str, Mapping[str, str]] = {character.name: fields(character) for character in CAST}
OTHER_FIELDS: Mapping[str, Mapping[str, str]] = {character.name: fields(character, "o_") for character in CAST}
