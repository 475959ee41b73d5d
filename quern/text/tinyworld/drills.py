"""Drills: what a small model needs before it can spell, count and choose.

- `about_letters`: the first or last letter of a word, or several words to spell; only of words that may be asked for.
- `dictionary`: whether the model knows a word, for every word. The reply names the word and spells nothing. Without
  it, a model that is fine-tuned on some words forgets how to name the others.
- `options`: lettered options, with a few questions about the same list: which option has a letter, which fact, which
  category. One list gives several targets; a single question gives one.
"""

from quern.text.tinyworld.data import WORDS, wordings
from quern.text.tinyworld.facts import CAST, RELATIONS, VALUES
from quern.text.tinyworld.prose import Pen, joined
from quern.text.tinyworld.skills import (
    CATEGORIES,
    CATEGORY_NAMES,
    OPTION_COUNTS,
    TRAIN_WORDS,
    Exchange,
    exchange,
    is_asked_in_conversations,
    lettered,
    line_of,
    sentence,
)

_W = wordings("drills")
Asked = tuple[str, str]
"""A question and its option."""


def about_letters(pen: Pen) -> Exchange:
    """A letter of a word, or several words to spell."""
    if pen.maybe(0.4):
        words = pen.rng.sample(TRAIN_WORDS, 2 + pen.below(3))
        question = pen.pick(_W["several_questions"]).format(words=joined(words))
        return exchange(question, " ".join(map(sentence, words)))
    word, first = pen.pick(TRAIN_WORDS), pen.maybe(0.5)
    which = "first" if first else "last"
    question = pen.pick(_W["letter_questions"]).format(which=which, word=word)
    reply = f"{sentence(word)} The {which} letter is {word[0] if first else word[-1]}."
    return exchange(question, reply)


def dictionary(pen: Pen) -> Exchange:
    """Whether the model knows a word."""
    word = pen.pick(WORDS)
    question = pen.pick(_W["dictionary_questions"]).format(word=word)
    return exchange(question, f"The word {word} is in my dictionary.")


def options(pen: Pen) -> Exchange:
    """Questions about one list of lettered options."""
    make = pen.pick((_named, _named, _of_facts, _of_facts, _of_categories))
    values, asked = make(pen, pen.pick(OPTION_COUNTS))
    if make is _named and pen.maybe(0.7):
        some = [value for _, value in asked][: 2 + pen.below(3)]
        question = pen.pick(_W["several_letters_questions"]).format(values=joined(some))
        return exchange(f"{question}\n{lettered(values)}", "\n".join(line_of(values, value) for value in some))
    messages: Exchange = []
    for question, value in asked[: 2 + pen.below(2)]:
        text = question if messages else f"{question}\n{lettered(values)}"
        messages += exchange(text, line_of(values, value))
    return messages


def _named(pen: Pen, count: int) -> tuple[list[str], list[Asked]]:
    """Options that are asked for by name: values of a relation, or any words."""
    values = pen.rng.sample(WORDS if pen.maybe(0.5) else VALUES[pen.pick(RELATIONS)], count)
    return values, [(pen.pick(_W["named_questions"]).format(value=value), value) for value in _shuffled(pen, values)]


def _of_facts(pen: Pen, count: int) -> tuple[list[str], list[Asked]]:
    """Values of a relation, and questions for characters that have one of them each."""
    relation = pen.pick(RELATIONS)
    known = [one for one in CAST if is_asked_in_conversations(one.name, relation)]
    character_of = {one.fact(relation): one for one in pen.rng.sample(known, len(known))}
    characters = pen.rng.sample(list(character_of.values()), count)
    if relation == "friend":  # nobody is asked for whose name is an option
        names = {one.fact(relation) for one in characters}
        characters = [one for one in characters if one.name not in names] or characters[:1]
    values = [one.fact(relation) for one in characters]
    rest = [value for value in VALUES[relation] if value not in values and value not in {c.name for c in characters}]
    values += pen.rng.sample(rest, count - len(values))
    return _shuffled(pen, values), [(pen.ask(one, relation), one.fact(relation)) for one in characters]


def _of_categories(pen: Pen, count: int) -> tuple[list[str], list[Asked]]:
    """Words of different groups, and questions for the category of each."""
    found: dict[str, Asked] = {}
    for category in pen.rng.sample(CATEGORY_NAMES, len(CATEGORY_NAMES)):
        group, words = CATEGORIES[category]
        if group not in found and len(found) < count:
            question = pen.pick(wordings("skills")["category_questions"]).format(category=category)
            found[group] = (question, pen.pick(words))
    asked = list(found.values())
    return _shuffled(pen, [value for _, value in asked]), asked


def _shuffled(pen: Pen, values: list[str]) -> list[str]:
    return pen.rng.sample(values, len(values))
