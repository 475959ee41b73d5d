"""The facts of the tinyworld: who lives in the valley, and what is true of them.

What it is: the cast (72 characters in 12 villages), eight relations from a character to one word, and the
tools that turn templates into sentences. The facts come from one constant seed, so every document,
conversation and question of every seed speaks of the same world. What it is not: prose (prose.py)
or wordings of questions (wordings.py).

No value belongs to two relations, and none is a character's name, so that an answer can be judged by its
word alone.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORLD_SEED = "quern tinyworld, first edition"

NAMES_HE = """
Alder Barnaby Bodo Cedric Corin Dorian Edmund Ferris Gideon Hugo Ivo Jasper Kit Leopold Magnus Nestor Odo
Percy Quentin Rufus Silas Tobias Ulric Victor Wendell Yorick Zeno Anselm Bertram Casper Dunstan Elric
Florian Gregor Horace Jonah
""".split()
NAMES_SHE = """
Agatha Beatrix Clover Dahlia Edith Flora Greta Hazel Imogen Juniper Katya Lottie Mabel Nora Olive Pippa
Queenie Rosalind Sabine Tilda Una Vera Winifred Xenia Yara Zelda Amelia Bettina Cordelia Delphine Esme Freya
Gwendolyn Henrietta Isolde Josephine
""".split()

KINDS = """
fox otter hedgehog badger rabbit squirrel mole owl heron frog mouse robin beaver goose bear cat raven toad
""".split()

# village: where it lies, and what it is known for
HOMES = {
    "Fernhollow": ("under the old beech trees", "its ferns and its foggy mornings"),
    "Pebblewick": ("on the stony bank of the river", "its round blue pebbles"),
    "Larkmoor": ("high on the windy moor", "the larks that wake everyone at dawn"),
    "Thistledown": ("among fields of purple thistles", "its soft beds and long naps"),
    "Mossbridge": ("where the mossy bridge crosses the stream", "its bridge of three arches"),
    "Amberford": ("at the shallow ford", "its golden autumn market"),
    "Willowmere": ("beside the quiet lake", "its willows and its lantern boats"),
    "Copperhill": ("on the side of a red hill", "its copper roofs"),
    "Nettlecombe": ("in a narrow green valley", "its nettle tea"),
    "Saltmarsh": ("where the river meets the sea", "its salty wind and its tall lighthouse"),
    "Windlecote": ("around the old windmill", "its windmill with patched sails"),
    "Elmstead": ("on the edge of the deep wood", "its ring of seven elms"),
}

# work: (what they do, where they do it, something they make or handle, in the plural)
WORKS = {
    "baker": ("bakes bread", "bakery", "loaves"),
    "blacksmith": ("hammers iron", "forge", "horseshoes"),
    "potter": ("shapes clay", "pottery", "pots"),
    "beekeeper": ("looks after the bees", "bee garden", "hives"),
    "clockmaker": ("mends clocks", "clock shop", "clocks"),
    "gardener": ("tends the flower beds", "garden", "roses"),
    "weaver": ("weaves warm cloth", "weaving room", "blankets"),
    "carpenter": ("saws and planes wood", "workshop", "chairs"),
    "miller": ("grinds the grain", "mill", "sacks"),
    "messenger": ("carries the letters", "post house", "letters"),
    "librarian": ("lends out books", "library", "books"),
    "teacher": ("teaches the little ones", "schoolhouse", "lessons"),
    "shepherd": ("watches over the sheep", "hill pasture", "sheep"),
    "cobbler": ("mends shoes", "shoe shop", "boots"),
    "tailor": ("sews coats", "sewing room", "coats"),
    "painter": ("paints signs and doors", "studio", "signs"),
    "doctor": ("takes care of the sick", "sickroom", "bandages"),
    "lamplighter": ("lights the street lamps", "lamp house", "lamps"),
}
FOODS = """
plums pancakes honey walnuts dumplings cherries porridge mushrooms gingerbread blackberries soup pears
cheese custard carrots noodles
""".split()
COLOURS = "red blue green yellow purple orange white silver pink brown".split()
HOBBIES = """
fishing singing dancing knitting stargazing whittling juggling sketching swimming skating drumming reading
climbing rowing
""".split()
TREASURES = """
compass lantern teapot whistle telescope violin umbrella mirror locket map bell kite globe ring feather
marble
""".split()

RELATIONS = ("kind", "home", "work", "friend", "food", "colour", "hobby", "treasure")


@dataclass(frozen=True)
class Character:
    """One inhabitant: every fact is a single word; `friend` is a name, and friendship goes both ways."""

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
        if relation not in RELATIONS:
            raise ValueError(f"no relation {relation!r}; the relations are {', '.join(RELATIONS)}")
        return getattr(self, relation)


def _dealt(values: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Deal values to `count` characters as evenly as possible, so that all blind guesses are alike."""
    hand = [values[index % len(values)] for index in range(count)]
    rng.shuffle(hand)
    return hand


def _make_cast() -> tuple[Character, ...]:
    rng = random.Random(WORLD_SEED)
    people = [(name, False) for name in NAMES_HE] + [(name, True) for name in NAMES_SHE]
    rng.shuffle(people)
    names = [name for name, _ in people]
    pairs = list(range(len(names)))
    rng.shuffle(pairs)
    friend = {}
    for left, right in zip(pairs[0::2], pairs[1::2], strict=True):
        friend[names[left]], friend[names[right]] = names[right], names[left]
    count = len(people)
    columns = [_dealt(v, count, rng) for v in (KINDS, list(HOMES), list(WORKS), FOODS, COLOURS, HOBBIES, TREASURES)]
    cast = []
    for (name, she), kind, home, work, food, colour, hobby, treasure in zip(people, *columns, strict=True):
        cast.append(Character(name, she, kind, home, work, friend[name], food, colour, hobby, treasure))
    return tuple(sorted(cast, key=lambda character: character.name))


CAST = _make_cast()
CHARACTERS: Mapping[str, Character] = {character.name: character for character in CAST}
VALUES: Mapping[str, tuple[str, ...]] = {
    relation: tuple(sorted({character.fact(relation) for character in CAST})) for relation in RELATIONS
}


def a(noun: str) -> str:
    """The noun behind its indefinite article (every word of the world sounds as it is spelled)."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def blind_guess(relation: str) -> float:
    """Chance of guessing a fact: the share of the relation's most common value."""
    facts = [character.fact(relation) for character in CAST]
    return max(facts.count(value) for value in VALUES[relation]) / len(facts)


def fields(character: Character, prefix: str = "") -> dict[str, str]:
    """What templates may say about a character: facts, pronouns, and words that go with the facts."""
    lies, known = HOMES[character.home]
    does, place, things = WORKS[character.work]
    friend = CHARACTERS[character.friend]
    words = {relation: character.fact(relation) for relation in RELATIONS}
    he, him, his, himself = ("she", "her", "her", "herself") if character.she else ("he", "him", "his", "himself")
    words |= {"name": character.name, "he": he, "him": him, "his": his, "himself": himself}
    words |= {"He": upper_first(he), "His": upper_first(his), "a_kind": a(character.kind)}
    words |= {
        "a_work": a(character.work),
        "a_treasure": a(character.treasure),
        "a_colour": a(character.colour),
    }
    words |= {"lies": lies, "known": known, "does": does, "place": place, "things": things}
    words |= {"friend_kind": friend.kind, "Food": upper_first(character.food)}
    words |= {
        "friend_home": friend.home,
        "Hobby": upper_first(character.hobby),
        "Colour": upper_first(character.colour),
    }
    return {prefix + key: value for key, value in words.items()}


FIELDS: Mapping[str, Mapping[str, str]] = {character.name: fields(character) for character in CAST}
OTHER_FIELDS: Mapping[str, Mapping[str, str]] = {character.name: fields(character, "o_") for character in CAST}

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def expand(template: str) -> list[str]:
    """All readings of a template: `[a|b] c` reads `a c` and `b c`."""
    found = _CHOICE.search(template)
    if found is None:
        return [re.sub(r"  +", " ", template).strip(" ")]
    head, tail = template[: found.start()], template[found.end() :]
    return [reading for option in found.group(1).split("|") for reading in expand(head + option + tail)]


def lines(block: str) -> tuple[str, ...]:
    """The readings of a block of templates, one a line; a line indented deeper goes on with the one above."""
    templates: list[str] = []
    indent = 0
    for line in block.rstrip().splitlines():
        depth = len(line) - len(line.lstrip())
        if templates and depth > indent:
            templates[-1] += " " + line.strip()
        elif line.strip():
            indent = depth
            templates.append(line.strip())
    return tuple(reading for template in templates for reading in expand(template))
