"""The facts of the tinyworld: who lives in the valley, and eight relations from a character to one word.

The cast is 72 characters in 12 villages. A constant seed deals the values of facts.toml to the characters, so every
seed of the corpus describes the same world. Templates take their fields from `FIELDS`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quern.text.tinyworld.data import table, words

WORLD_SEED = "quern tinyworld, first edition"
RELATIONS = ("kind", "home", "work", "friend", "food", "colour", "hobby", "treasure")

_TABLE = table("facts")
KINDS, FOODS, COLOURS, HOBBIES, TREASURES = (
    words(_TABLE["values"][relation]) for relation in ("kind", "food", "colour", "hobby", "treasure")
)
HOMES: Mapping[str, tuple[str, str]] = {home: tuple(facts) for home, facts in _TABLE["homes"].items()}
WORKS: Mapping[str, tuple[str, str, str]] = {work: tuple(facts) for work, facts in _TABLE["works"].items()}


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


def _dealt(values: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` values in random order, each as often as the others, so that all blind guesses are alike."""
    hand = [values[index % len(values)] for index in range(count)]
    rng.shuffle(hand)
    return hand


def _make_cast() -> tuple[Character, ...]:
    rng = random.Random(WORLD_SEED)
    people = [(name, she) for she, key in ((False, "he"), (True, "she")) for name in words(_TABLE["names"][key])]
    rng.shuffle(people)
    names = [name for name, _ in people]
    pairs = list(range(len(names)))
    rng.shuffle(pairs)
    friend = {}
    for left, right in zip(pairs[0::2], pairs[1::2], strict=True):
        friend[names[left]], friend[names[right]] = names[right], names[left]
    values = (KINDS, list(HOMES), list(WORKS), FOODS, COLOURS, HOBBIES, TREASURES)
    columns = [_dealt(column, len(people), rng) for column in values]
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
