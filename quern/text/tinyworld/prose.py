"""The tinyworld's prose: stories, biographies, dialogues, letters, diaries, comparisons and lists.

Each maker takes a Pen (a seeded source of chance) and returns one document as plain text. All facts are
those of tinyworld_facts; chance decides who appears, what happens and how it is told.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from quern.text.tinyworld import plots
from quern.text.tinyworld.facts import (
    CAST,
    CHARACTERS,
    FIELDS,
    HOMES,
    OTHER_FIELDS,
    RELATIONS,
    Character,
    a,
    lines,
)
from quern.text.tinyworld.wordings import (
    ANSWERS,
    DIRECT_QUESTIONS,
    QUESTIONS,
    SELF_STATEMENTS,
    STATEMENTS,
    TAILS,
)
from quern.text.tinyworld.words import ADJECTIVES, MOODS

NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def _with_pronoun(templates: Sequence[str]) -> tuple[str, ...]:
    """The statements that begin with the name and use it once, told with a pronoun instead."""
    once = [template for template in templates if template.count("{name}") == 1]
    told = [t.replace("{name}'s", "{His}") for t in once if t.startswith("{name}'s")]
    return tuple(told + [t.replace("{name}", "{He}") for t in once if t.startswith("{name} ") and " and {" not in t])


PRONOUN_STATEMENTS = {relation: _with_pronoun(STATEMENTS[relation]) for relation in RELATIONS}

T = TypeVar("T")


class Pen:
    """A seeded hand: everything that a document owes to chance comes from here."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self._uniform = self.rng.random

    def pick(self, options: Sequence[T]) -> T:
        """Uniform choice, faster than rng.choice; it depends on rng.random() alone."""
        return options[int(self._uniform() * len(options))]

    def below(self, bound: int) -> int:
        return int(self.rng.random() * bound)

    def maybe(self, chance: float) -> bool:
        return self.rng.random() < chance

    def someone(self) -> Character:
        return CAST[self.below(len(CAST))]

    def other(self, character: Character) -> Character:
        """A second character: half of the time the best friend."""
        if self.maybe(0.5):
            return CHARACTERS[character.friend]
        while True:
            other = self.someone()
            if other is not character:
                return other

    def relations(self, count: int) -> list[str]:
        return self.rng.sample(RELATIONS, count)

    def chance_fields(self) -> dict[str, str]:
        pick = self.pick
        adjective = pick(ADJECTIVES)
        return {
            "adj": adjective,
            "a_adj": a(adjective),
            "mood": pick(MOODS),
            "vessel": pick(plots.VESSELS),
            "day": pick(plots.DAYS),
            "season": pick(plots.SEASONS),
            "weather": pick(plots.WEATHER),
            "time": pick(plots.TIMES),
            "spot": pick(plots.SPOTS),
            "small": pick(plots.SMALL),
            "thing": pick(plots.THINGS),
            "number": pick(NUMBER_WORDS),
            "month": pick(plots.MONTHS),
        }

    def tell(self, character: Character, relation: str, pronoun: float = 0.0) -> str:
        """One fact in one sentence, with a pronoun in the given share of the cases."""
        wordings = PRONOUN_STATEMENTS if self.maybe(pronoun) else STATEMENTS
        return self.pick(wordings[relation] or STATEMENTS[relation]).format_map(FIELDS[character.name])

    def ask(self, character: Character, relation: str) -> str:
        return self.pick(QUESTIONS[relation]).format_map(FIELDS[character.name])

    def answer(self, character: Character, relation: str) -> str:
        return self.pick(ANSWERS[relation]).format_map(FIELDS[character.name])

    def own(self, character: Character, relation: str) -> str:
        return self.pick(SELF_STATEMENTS[relation]).format_map(FIELDS[character.name])


def joined(words: Sequence[str]) -> str:
    """An English list: `a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _fits(scenes: str, hero: Character, other: Character) -> bool:
    """Whether a plot makes sense with these two: no contrast of equals, no absent friend who is there."""
    if "{friend" in scenes and other.name == hero.friend:
        return False
    return not any(
        hero.fact(relation) == other.fact(relation) and f"{{{relation}}}" in scenes and f"{{o_{relation}}}" in scenes
        for relation in ("food", "colour", "hobby", "treasure")
    )


def _adventure(pen: Pen, hero: Character) -> tuple[list[str], Mapping[str, str], Character]:
    """The scenes of one plot, the words they were told with, and the other character in them."""
    templates = [pen.pick(scene) for scene in pen.pick(plots.PLOTS)]
    other = pen.other(hero)
    while not _fits(" ".join(templates), hero, other):
        other = pen.other(hero)
    words = {**FIELDS[hero.name], **OTHER_FIELDS[other.name], **pen.chance_fields()}
    return [template.format_map(words) for template in templates], words, other


def story(pen: Pen, hero: Character | None = None, short: bool = False) -> str:
    """A story of one plot, sometimes of two, with a few facts about the hero told on the way."""
    hero = hero or pen.someone()
    scenes, words, other = _adventure(pen, hero)
    told = [pen.pick(plots.OPENINGS).format_map(words)]
    ending = pen.pick(plots.ENDINGS).format_map(words)
    if pen.maybe(0.3):
        ending += " " + pen.pick(plots.MORALS)
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
        paragraphs.append(pen.pick(plots.BRIDGES).format_map(words) + " " + " ".join(more))
    text = "\n\n".join(paragraphs) + ("\n\n" if pen.maybe(0.3) else " ") + ending
    return pen.pick(TITLES).format_map(words) + "\n\n" + text if pen.maybe(0.3) else text


TITLES = lines("""
    [The Story of|A Tale of|The Adventure of] {name} the {kind}
    {name} and {o_name}
    [A Day in|News from] {home}
    {name}, the {work} of {home}
    """)


def biography(pen: Pen) -> str:
    """Almost everything there is to know about one character, or two, in any order and many ways."""
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
            first, second = (pen.pick(TAILS[r]) for r in order[index : index + 2])
            text.append(f"{character.name} {first} and {second}.".format_map(FIELDS[character.name]))
            index += 2
        else:
            text.append(pen.tell(character, order[index], 0.5))
            index += 1
    return " ".join(text)


def profile(pen: Pen) -> str:
    """A card with one fact a line."""
    character = pen.someone()
    labels = {"kind": "Animal", "home": "Village", "work": "Work", "friend": "Best friend"}
    labels |= {
        "food": "Favourite food",
        "colour": "Favourite colour",
        "hobby": "Hobby",
        "treasure": "Treasure",
    }
    order = pen.relations(5 + pen.below(4))
    return "\n".join([f"Name: {character.name}", *(f"{labels[r]}: {character.fact(r)}" for r in order)])


GREETINGS = ("Good morning!", "Good evening!", "Hello there!", "What a fine day!", "How nice to see you!")
SAID = ("asked", "asked", "wondered", "inquired")
REPLIED = ("said", "answered", "replied", "said")
FAREWELLS = lines("""
    "I must go now," said {name}. "[See you on {day}|Goodbye|Until {day}]!"
    "Come and visit me in {home}," said {name}.
    Then they [shook hands|waved|smiled] and went their ways.
    "It was good to talk to you, {o_name}," said {name}.
    """)


def quoted(sentence: str, verb: str, speaker: Character) -> str:
    """Direct speech: the sentence's full stop becomes a comma before who said it."""
    return f'"{sentence.removesuffix(".")}," {verb} {speaker.name}.'


def dialogue(pen: Pen) -> str:
    """Two characters ask each other about themselves."""
    asker = pen.someone()
    teller = pen.other(asker)
    words = {**FIELDS[asker.name], **OTHER_FIELDS[teller.name], **pen.chance_fields()}
    script = pen.maybe(0.4)
    text = [] if script else ["On a {weather} {time} {name} the {kind} met {o_name} at {spot}.".format_map(words)]
    if pen.maybe(0.6):
        greeting = pen.pick(GREETINGS)
        text.append(f"{asker.name}: {greeting}" if script else f'"{greeting}" said {asker.name}.')
    for relation in pen.relations(3 + pen.below(4)):
        question, reply = pen.pick(DIRECT_QUESTIONS[relation]), pen.own(teller, relation)
        if script:
            text += [f"{asker.name}: {question}", f"{teller.name}: {reply}"]
            if pen.maybe(0.4):
                text.append(f"{asker.name}: {pen.own(asker, relation)}")
            continue
        answer = quoted(reply, pen.pick(REPLIED), teller)
        text.append(f'"{question}" {pen.pick(SAID)} {asker.name}. {answer}')
        if pen.maybe(0.4):
            text.append(quoted(pen.own(asker, relation), "said", asker))
    if not script:
        text.append(pen.pick(FAREWELLS).format_map(words))
    return "\n".join(text)


def letter(pen: Pen) -> str:
    """A letter from one character to another, with news of a third."""
    writer = pen.someone()
    reader = CHARACTERS[writer.friend] if pen.maybe(0.6) else pen.other(writer)
    words = {**FIELDS[writer.name], **OTHER_FIELDS[reader.name], **pen.chance_fields()}
    body = [pen.pick(LETTER_OPENINGS).format_map(words)]
    told = [relation for relation in pen.relations(2 + pen.below(3)) if writer.fact(relation) != reader.name]
    body += [pen.own(writer, relation) for relation in told]
    third = pen.other(reader)
    if third is not writer:
        body.append(pen.pick(LETTER_NEWS).format_map({**words, **FIELDS[third.name]}))
        body += [pen.tell(third, relation, 0.3) for relation in pen.relations(1 + pen.below(2))]
    body.append(pen.pick(LETTER_ENDINGS).format_map(words))
    close = pen.pick(("Your", "Yours,", "With love,", "Warm wishes from"))
    return f"Dear {reader.name},\n\n{' '.join(body)}\n\n{close}\n{writer.name} the {writer.kind}"


LETTER_OPENINGS = lines("""
    It is a {weather} {day} here in {home}, and I am thinking of you.
    How are you, and how is {o_home}?
    Thank you for the {thing} and for the {o_food}, which I know you love.
    I am writing to you from {home}, {lies}.
    In your last letter you asked me about myself, so here I am.
    """)
LETTER_NEWS = lines("""
    [Yesterday|On {day}|Last {day}] I met {name} the {kind}.
    Do you know {name} from {home}?
    There is also news about {name}, the {work}.
    """)
LETTER_ENDINGS = lines("""
    Come and see me soon, and bring your {o_treasure} with you, for I know it is your treasure.
    I hope that you have time for {o_hobby}, which you enjoy so much.
    Please write back before {month}.
    I will cook {o_food} when you come, because you like that best.
    Say hello to everyone in {o_home}.
    """)


def diary(pen: Pen) -> str:
    """A few days in a character's diary."""
    writer = pen.someone()
    first = pen.below(7)
    entries = []
    for day in range(2 + pen.below(3)):
        friend = CHARACTERS[writer.friend]
        words = {**FIELDS[writer.name], **OTHER_FIELDS[friend.name], **pen.chance_fields()}
        text = [pen.pick(DIARY).format_map(words), pen.own(writer, pen.pick(RELATIONS))]
        if pen.maybe(0.6):
            text.append(pen.tell(pen.other(writer), pen.pick(RELATIONS)))
        entries.append(f"{plots.DAYS[(first + day) % 7]}. {' '.join(text)}")
    return f"The diary of {writer.name}, {a(writer.kind)} from {writer.home}\n\n" + "\n\n".join(entries)


DIARY = lines("""
    Today was {weather}, and I spent the {time} {hobby}.
    I got up early and walked to {spot}, where I saw a {small}.
    I had {food} for breakfast, and then I had some more {food}.
    {o_name} came to visit me, as best friends do.
    There was much to do with the {things} today.
    Somebody left a {thing} at my door here in {home}, and I wonder who it was.
    I polished my {treasure} until it shone.
    Nothing happened today, and it was lovely.
    I bought something {colour}, because I can never have enough of that colour.
    """)


def comparison(pen: Pen) -> str:
    """Facts about several characters side by side."""
    text = []
    for _ in range(4 + pen.below(7)):
        one = pen.someone()
        other = pen.other(one)
        relation = pen.pick(RELATIONS)
        if one.fact(relation) == other.name:
            continue
        words = {**FIELDS[one.name], **OTHER_FIELDS[other.name]}
        if one.fact(relation) == other.fact(relation):
            tail = pen.pick(TAILS[relation]).format_map(words)
            text.append(f"{one.name} {tail}, and so {'is' if tail.startswith('is ') else 'does'} {other.name}.")
            continue
        first = pen.pick(TAILS[relation]).format_map(FIELDS[one.name])
        second = pen.pick(TAILS[relation]).format_map(FIELDS[other.name])
        text.append(f"{one.name} {first}{pen.pick((', but ', ', while ', ', and '))}{other.name} {second}.")
    return " ".join(text)


def village(pen: Pen) -> str:
    """A village, what it is known for, and some who live there."""
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
