"""The tinyworld's prose: stories, biographies, dialogues, letters, diaries, comparisons and lists.

Each function takes a Pen (a seeded random generator) and returns one document as plain text. The facts come from
world.py. Who appears, what happens and how it is told is random.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quern.text.tinyworld import world
from quern.text.tinyworld.world import CAST, CHARACTERS, FIELDS, HOMES, OTHER_FIELDS, RELATIONS, Character, a

_W = world.wordings("prose")


def _with_pronoun(templates: Sequence[str]) -> tuple[str, ...]:
    """The statements that begin with the name and use it once, with a pronoun instead of the name."""
    once = [template for template in templates if template.count("{name}") == 1]
    told = [t.replace("{name}'s", "{His}") for t in once if t.startswith("{name}'s")]
    return tuple(told + [t.replace("{name}", "{He}") for t in once if t.startswith("{name} ") and " and {" not in t])


STATEMENTS = world.WORDINGS["statements"]
PRONOUN_STATEMENTS = {relation: _with_pronoun(STATEMENTS[relation]) for relation in RELATIONS}

T = TypeVar("T")
Row = TypeVar("Row", bound=tuple[Any, ...])


class Pen:
    """The source of every random choice of one document."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self._uniform = self.rng.random

    def pick(self, options: Sequence[T]) -> T:
        """Uniform choice. Faster than rng.choice, and depends only on rng.random()."""
        return options[int(self._uniform() * len(options))]

    def pick_by_share(self, rows: Sequence[Row]) -> Row:
        """A row of a table whose first column is the row's share."""
        return self.rng.choices(rows, [row[0] for row in rows])[0]

    def below(self, bound: int) -> int:
        return int(self._uniform() * bound)

    def maybe(self, chance: float) -> bool:
        return self._uniform() < chance

    def someone(self) -> Character:
        return self.pick(CAST)

    def other(self, character: Character) -> Character:
        """A second character, with probability 0.5 the best friend."""
        if self.maybe(0.5):
            return CHARACTERS[character.friend]
        while True:
            other = self.someone()
            if other is not character:
                return other

    def relations(self, count: int) -> list[str]:
        return self.rng.sample(RELATIONS, count)

    def chance_fields(self) -> dict[str, str]:
        picked = {field: self.pick(choices) for field, choices in world.CHANCES.items()}
        return picked | {"a_adj": a(picked["adj"])}

    def tell(self, character: Character, relation: str, pronoun: float = 0.0) -> str:
        """One fact in one sentence. `pronoun` is the probability of a pronoun in place of the name."""
        told = PRONOUN_STATEMENTS if self.maybe(pronoun) else STATEMENTS
        return self.pick(told[relation] or STATEMENTS[relation]).format_map(FIELDS[character.name])

    def say(self, wordings: str, character: Character, relation: str) -> str:
        """One fact, or the question for it. wordings: a key of `world.WORDINGS`."""
        return self.pick(world.WORDINGS[wordings][relation]).format_map(FIELDS[character.name])


def joined(words: Sequence[str]) -> str:
    """An English list: `a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _fits(scenes: str, hero: Character, other: Character) -> bool:
    """Whether a plot fits these two: no contrast of equal values, and the other is not the absent friend."""
    if "{friend" in scenes and other.name == hero.friend:
        return False
    return not any(
        hero.fact(relation) == other.fact(relation) and f"{{{relation}}}" in scenes and f"{{o_{relation}}}" in scenes
        for relation in ("food", "colour", "hobby", "treasure")
    )


def _adventure(pen: Pen, hero: Character) -> tuple[list[str], Mapping[str, str], Character]:
    """The scenes of one plot, the fields of their templates, and the other character."""
    templates = [pen.pick(scene) for scene in pen.pick(world.PLOTS)]
    other = pen.other(hero)
    while not _fits(" ".join(templates), hero, other):
        other = pen.other(hero)
    words = {**FIELDS[hero.name], **OTHER_FIELDS[other.name], **pen.chance_fields()}
    return [template.format_map(words) for template in templates], words, other


def story(pen: Pen, hero: Character | None = None, short: bool = False) -> str:
    """A story of one plot, sometimes two, with a few facts about the hero."""
    hero = hero or pen.someone()
    scenes, words, other = _adventure(pen, hero)
    told = [pen.pick(world.STORY_OPENINGS).format_map(words)]
    ending = pen.pick(world.ENDINGS).format_map(words)
    if pen.maybe(0.3):
        ending += " " + pen.pick(world.MORALS)
    if short:
        return " ".join([told[0], *scenes, ending])
    told += [pen.tell(hero, relation, 0.4) for relation in pen.relations(1 + pen.below(3))]
    if pen.maybe(0.5):
        told.append(pen.tell(other, pen.pick(RELATIONS)))
    half = 2 + pen.below(2)
    paragraphs = [" ".join(told), " ".join(scenes[:half]), " ".join(scenes[half:])]
    if pen.maybe(0.5):
        paragraphs[1:] = [" ".join(scenes)]
    if pen.maybe(0.3):
        more, words, _ = _adventure(pen, hero)
        paragraphs.append(pen.pick(world.BRIDGES).format_map(words) + " " + " ".join(more))
    text = "\n\n".join(paragraphs) + ("\n\n" if pen.maybe(0.3) else " ") + ending
    return pen.pick(_W["titles"]).format_map(words) + "\n\n" + text if pen.maybe(0.3) else text


def biography(pen: Pen) -> str:
    """Most facts about one character or two, in random order."""
    character = pen.someone()
    text = _life(pen, character)
    if pen.maybe(0.4):
        text += ("\n\n" if pen.maybe(0.5) else " ") + _life(pen, pen.other(character))
    return text


def _life(pen: Pen, character: Character) -> str:
    order = pen.relations(5 + pen.below(4))
    text = [pen.tell(character, order[0])]
    index = 1
    while index < len(order):
        if index + 1 < len(order) and pen.maybe(0.3):
            first, second = (pen.say("tails", character, relation) for relation in order[index : index + 2])
            text.append(f"{character.name} {first} and {second}.")
            index += 2
        else:
            text.append(pen.tell(character, order[index], 0.5))
            index += 1
    return " ".join(text)


def profile(pen: Pen) -> str:
    """A card with one fact on each line."""
    character = pen.someone()
    labels = world.table("prose")["labels"]
    order = pen.relations(5 + pen.below(4))
    return "\n".join([f"Name: {character.name}", *(f"{labels[r]}: {character.fact(r)}" for r in order)])


def quoted(sentence: str, verb: str, speaker: Character) -> str:
    """Direct speech: a comma before the speaker replaces the full stop of the sentence."""
    return f'"{sentence.removesuffix(".")}," {verb} {speaker.name}.'


def dialogue(pen: Pen) -> str:
    """One character asks another, and sometimes tells the same of itself."""
    asker = pen.someone()
    teller = pen.other(asker)
    words = {**FIELDS[asker.name], **OTHER_FIELDS[teller.name], **pen.chance_fields()}
    script = pen.maybe(0.4)
    text = [] if script else ["On a {weather} {time} {name} the {kind} met {o_name} at {spot}.".format_map(words)]
    if pen.maybe(0.6):
        greeting = pen.pick(_W["greetings"])
        text.append(f"{asker.name}: {greeting}" if script else f'"{greeting}" said {asker.name}.')
    for relation in pen.relations(3 + pen.below(4)):
        question, reply = pen.say("direct_questions", teller, relation), pen.say("self_statements", teller, relation)
        if script:
            text += [f"{asker.name}: {question}", f"{teller.name}: {reply}"]
            if pen.maybe(0.4):
                text.append(f"{asker.name}: {pen.say('self_statements', asker, relation)}")
            continue
        answer = quoted(reply, pen.pick(_W["replied"]), teller)
        text.append(f'"{question}" {pen.pick(_W["said"])} {asker.name}. {answer}')
        if pen.maybe(0.4):
            text.append(quoted(pen.say("self_statements", asker, relation), "said", asker))
    if not script:
        text.append(pen.pick(_W["farewells"]).format_map(words))
    return "\n".join(text)


def letter(pen: Pen) -> str:
    """A letter from one character to another, with news of a third."""
    writer = pen.someone()
    reader = CHARACTERS[writer.friend] if pen.maybe(0.6) else pen.other(writer)
    words = {**FIELDS[writer.name], **OTHER_FIELDS[reader.name], **pen.chance_fields()}
    body = [pen.pick(_W["letter_openings"]).format_map(words)]
    told = [relation for relation in pen.relations(2 + pen.below(3)) if writer.fact(relation) != reader.name]
    body += [pen.say("self_statements", writer, relation) for relation in told]
    third = pen.other(reader)
    if third is not writer:
        body.append(pen.pick(_W["letter_news"]).format_map({**words, **FIELDS[third.name]}))
        body += [pen.tell(third, relation, 0.3) for relation in pen.relations(1 + pen.below(2))]
    body.append(pen.pick(_W["letter_endings"]).format_map(words))
    close = pen.pick(_W["letter_closes"])
    return f"Dear {reader.name},\n\n{' '.join(body)}\n\n{close}\n{writer.name} the {writer.kind}"


def diary(pen: Pen) -> str:
    """A few days in a character's diary."""
    writer = pen.someone()
    first = pen.below(7)
    entries = []
    for day in range(2 + pen.below(3)):
        words = {**FIELDS[writer.name], **OTHER_FIELDS[writer.friend], **pen.chance_fields()}
        text = [pen.pick(_W["diary"]).format_map(words), pen.say("self_statements", writer, pen.pick(RELATIONS))]
        if pen.maybe(0.6):
            text.append(pen.tell(pen.other(writer), pen.pick(RELATIONS)))
        entries.append(f"{world.DAYS[(first + day) % 7]}. {' '.join(text)}")
    return f"The diary of {writer.name}, {a(writer.kind)} from {writer.home}\n\n" + "\n\n".join(entries)


def comparison(pen: Pen) -> str:
    """Facts about several characters side by side."""
    text = []
    for _ in range(4 + pen.below(7)):
        one = pen.someone()
        other = pen.other(one)
        relation = pen.pick(RELATIONS)
        if one.fact(relation) == other.name:
            continue
        first = pen.say("tails", one, relation)
        if one.fact(relation) == other.fact(relation):
            text.append(f"{one.name} {first}, and so {'is' if first.startswith('is ') else 'does'} {other.name}.")
            continue
        second = pen.say("tails", other, relation)
        text.append(f"{one.name} {first}{pen.pick((', but ', ', while ', ', and '))}{other.name} {second}.")
    return " ".join(text)


def village(pen: Pen) -> str:
    """A village, what it is known for, and some of its inhabitants."""
    home = pen.pick(tuple(HOMES))
    lies, known = HOMES[home]
    people = [character for character in CAST if character.home == home]
    pen.rng.shuffle(people)
    text = [f"{home} lies {lies}.", f"It is known for {known}."]
    if pen.maybe(0.5):
        text.append(f"In {home} live {joined([c.name for c in people])}.")
    for character in people[: 2 + pen.below(4)]:
        text.append(pen.tell(character, "home" if pen.maybe(0.4) else pen.pick(RELATIONS)))
    return " ".join(text)
