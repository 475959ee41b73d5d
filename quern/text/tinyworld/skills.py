"""The tinyworld's skills: sums, word problems, spelling, letter counting and multiple choice.

An Exercise is a question, its answer, and a reply that shows the steps: a tool call for sums, and for counting the word
spelled letter by letter, then again with running numbers. A reply spells as the documents do: "The word river is
spelled r-i-v-e-r". The letter of a choice stands directly after its option, in the list and in the reply: a small model
copies a line long before it can say the letter alone. A hash of the content decides which exercises are held out:

- sums: one pair of operands in ten (in either order, for + and *) is in no training text;
- word problems: held-out operands, and one pair of (character, things) in six, which no training problem uses;
- spelling and counting: no training text asks for two words in six, one held out, one practised in reinforcement
  learning. Documents do spell both, because a tokenized model could not know their letters otherwise;
- multiple choice: the wordings are held out. The options are random.

Drills are what a small model needs before it can spell, count and choose. Without `dictionary`, which asks whether the
model knows a word, a model that is fine-tuned on some words forgets how to name the others. A list of `options` with
several questions gives several targets; a single question gives one.
"""

import hashlib
import operator as arithmetic
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from quern.text.chat import ContentPart, Message
from quern.text.tinyworld import world
from quern.text.tinyworld.prose import Pen, joined
from quern.text.tinyworld.world import CAST, FIELDS, OTHER_FIELDS, RELATIONS, VALUES, WORDS, a

_W = world.wordings("skills")
LETTERS = ("A", "B", "C", "D")
TRAIN_LETTERS = (*LETTERS, "E")  # training also has lists of two, three and five options; the evaluation has four
OPTION_COUNTS = (2, 3, 4, 4, 4, 5)


def bucket(text: str, buckets: int) -> int:
    """A number below `buckets` that depends only on the text, and is the same on any machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") % buckets


def sum_is_held_out(left: int, operator: str, right: int) -> bool:
    if operator in "+*" and left > right:
        left, right = right, left
    return bucket(f"{left} {operator} {right}", 10) == 0


def is_asked_in_conversations(name: str, relation: str) -> bool:
    """Three of four facts are asked in conversations and quizzes; the others only in documents."""
    return bucket(f"ask {name} for {relation}", 4) != 0


def askable(pen: Pen) -> tuple[world.Character, str]:
    """A character and a relation that conversations ask for."""
    while True:
        character, relation = pen.someone(), pen.pick(RELATIONS)
        if is_asked_in_conversations(character.name, relation):
            return character, relation


HELD_OUT_WORDS = tuple(word for word in WORDS if bucket(f"spell {word}", 6) == 0)
PRACTICE_WORDS = tuple(word for word in WORDS if bucket(f"spell {word}", 6) == 1)
"""Asked for in reinforcement learning only."""
TRAIN_WORDS = tuple(word for word in WORDS if word not in HELD_OUT_WORDS + PRACTICE_WORDS)


@dataclass(frozen=True)
class Exercise:
    """A question, its answer, and a reply. call: the expression that the reply sends to the calculator; chance: the
    accuracy of the best blind guess."""

    kind: str
    question: str
    answer: str
    reply: str
    call: str | None = None
    chance: float = 0.0


Exchange = list[Message]


def exchange(question: str, reply: str | list[ContentPart]) -> Exchange:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


# ------------------------------------------------------------------------------------------------- sums

OPERATORS = {
    "+": ("plus", arithmetic.add),
    "-": ("minus", arithmetic.sub),
    "*": ("times", arithmetic.mul),
    "/": ("divided by", arithmetic.floordiv),
}
LARGEST = (20, 99, 99, 999, 999, 9999)


def operands(pen: Pen, held_out: bool, operator: str, largest: int) -> tuple[int, int]:
    """Two operands of up to about `largest`. Quotients are exact, and every result is above 1."""
    while True:
        if operator == "*":
            left, right = 2 + pen.below(min(largest, 999) - 1), 2 + pen.below(min(largest, 99) - 1)
            left, right = (right, left) if pen.maybe(0.5) else (left, right)
        elif operator == "/":
            right = 2 + pen.below(min(largest, 30) - 1)
            left = right * (2 + pen.below(max(largest // right, 3)))
        else:
            left, right = 2 + pen.below(largest - 1), 2 + pen.below(largest - 1)
            if operator == "-":
                left, right = max(left, right) + 2, min(left, right)
        if sum_is_held_out(left, operator, right) == held_out:
            return left, right


def sum_exercise(pen: Pen, held_out: bool = False) -> Exercise:
    """A sum of two numbers of up to about 9,999."""
    operator = pen.pick("++++---**/")
    left, right = operands(pen, held_out, operator, pen.pick(LARGEST))
    word, compute = OPERATORS[operator]
    words = {"left": left, "sign": operator, "word": word, "right": right, "result": compute(left, right)}
    question = pen.pick(_W["sum_questions"]).format_map(words)
    reply = pen.pick(_W["sum_replies"]).format_map(words)
    return Exercise("sums", question, str(words["result"]), reply, call=f"{left}{operator}{right}")


# ---------------------------------------------------------------------------------------- word problems

PROBLEMS = [
    (operator, problem, reply)
    for kind in _W["problems"]
    for operator in kind["operator"]
    for problem in kind["problem"]
    for reply in kind["reply"]
]


def word_problem(pen: Pen, held_out: bool = False) -> Exercise:
    """A short story with two numbers. The reply calls the calculator."""
    while True:
        character, things = pen.someone(), pen.pick(world.THINGS)
        if (bucket(f"{character.name} and {things}", 6) == 0) == held_out:
            break
    operator, problem, reply = pen.pick(PROBLEMS)
    left, right = operands(pen, held_out, operator, pen.pick((20, 50, 99, 99, 300)) if operator in "+-" else 40)
    words = {**FIELDS[character.name], **OTHER_FIELDS[pen.other(character).name], "things": things}
    words |= {"left": str(left), "right": str(right), "result": str(OPERATORS[operator][1](left, right))}
    words["day"] = pen.pick(world.DAYS)
    question, reply = problem.format_map(words), reply.format_map(words)
    return Exercise("word_problems", question, words["result"], reply, call=f"{left}{operator}{right}")


# ---------------------------------------------------------------------------------- spelling and counting


def spelled(word: str) -> str:
    return "-".join(word)


def counted(word: str, letter: str | None) -> str:
    """The spelled word, with a running number after each letter that counts: b-e-r1-r2-y. None: all letters count."""
    count = 0
    parts = []
    for symbol in word:
        count += letter in (None, symbol)
        parts.append(f"{symbol}{count}" if letter in (None, symbol) else symbol)
    return "-".join(parts)


def count_shown(letters: str, letter: str | None) -> str:
    """The numbered letters and their count: "b-e-r1-r2-y: the letter r appears 2 times." """
    count = len(letters) if letter is None else letters.count(letter)
    what = "there are" if letter is None else f"the letter {letter} appears"
    unit = "letter" if letter is None else "time"
    return f"{counted(letters, letter)}: {what} {count} {unit}{'' if count == 1 else 's'}."


def spelling_exercise(pen: Pen, held_out: bool = False, words: Sequence[str] | None = None) -> Exercise:
    """words: to pick from, instead of those that are trained or held out."""
    word = pen.pick(words or (HELD_OUT_WORDS if held_out else TRAIN_WORDS))
    question = pen.pick(_W["spelling_questions"]).format(word=word)
    return Exercise("spelling", question, word, sentence(word))


def sentence(word: str) -> str:
    """The one wording in which replies spell a word."""
    return f"The word {word} is spelled {spelled(word)}."


@cache
def pairs_by_count(words: tuple[str, ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """(word, letter) pairs, by how often the letter is in the word: 0, 1, 2 or 3 times."""
    found: list[list[tuple[str, str]]] = [[], [], [], []]
    for word in words:
        for letter in "abcdefghiklmnoprstuwy":
            if word.count(letter) < 4:
                found[word.count(letter)].append((word, letter))
    return tuple(tuple(pairs) for pairs in found)


COUNTS = (0, 1, 1, 2, 2, 2, 3, 3)  # how often each count is asked for: 2 in three of eight
LENGTHS = tuple(len(word) for word in WORDS)
LENGTH_CHANCE = max(LENGTHS.count(length) for length in LENGTHS) / len(LENGTHS)


def counting_exercise(pen: Pen, held_out: bool = False, words: tuple[str, ...] | None = None) -> Exercise:
    """A question for the count of a letter in a word, or of the letters of the word. words: as for spelling."""
    words = words or (HELD_OUT_WORDS if held_out else TRAIN_WORDS)
    if pen.maybe(0.3):
        word = pen.pick(words)
        question = pen.pick(_W["length_questions"]).format(word=word)
        reply = f"{sentence(word)} {counted(word, None)}: the word {word} has {len(word)} letters."
        return Exercise("counting", question, str(len(word)), reply, chance=LENGTH_CHANCE)
    count = pen.pick(COUNTS)
    word, letter = pen.pick(pairs_by_count(words)[count])
    question = pen.pick(_W["counting_questions"]).format(word=word, letter=letter)
    reply = f"{sentence(word)} {count_shown(word, letter)}"
    return Exercise("counting", question, str(count), reply, chance=COUNTS.count(2) / len(COUNTS))


# ---------------------------------------------------------------------------------------- multiple choice

_GROUP = {category: group for group, categories in world.table("skills")["groups"].items() for category in categories}
# category -> (group, words): the wrong options come from other groups, so that no wrong option is right too
CATEGORIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "an animal": ("animals", world.KINDS),
    "a food": ("plants", world.FOODS),
    "a colour": ("materials", world.COLOURS),
    "a hobby": ("pastimes", world.HOBBIES),
    "a trade": ("trades", tuple(world.WORKS)),
    "a village": ("villages", tuple(world.HOMES)),
    "a day of the week": ("calendar", world.DAYS),
    "a month": ("calendar", world.MONTHS),
} | {a(category): (_GROUP.get(category, "objects"), members) for category, members in world.CATALOGUE.items()}
CATEGORY_NAMES = tuple(CATEGORIES)


def line_of(options: Sequence[str], option: str) -> str:
    """The line of an option in a list: the option, then its letter."""
    return f"- {option} {TRAIN_LETTERS[options.index(option)]}"


def lettered(options: Sequence[str]) -> str:
    """The lines of all options."""
    return "\n".join(line_of(options, option) for option in options)


def choice_exercise(pen: Pen, held_out: bool = False) -> Exercise:
    """A question with lettered options, four in the evaluation. The reply is the line of the right one."""
    held = "held_out_" if held_out else ""
    count = len(LETTERS) if held_out else pen.pick(OPTION_COUNTS)
    kind = pen.rng.random()
    if kind < 0.6:
        character, relation = (pen.someone(), pen.pick(RELATIONS)) if held_out else askable(pen)
        stem = pen.say(f"{held}questions", character, relation)
        right = character.fact(relation)
        wrong = [value for value in VALUES[relation] if value not in (right, character.name)]
    elif kind < 0.85:
        category = pen.pick(CATEGORY_NAMES)
        stem = pen.pick(_W[f"{held}category_questions"]).format(category=category)
        group, members = CATEGORIES[category]
        right = pen.pick(members)
        wrong = [pen.pick(words) for other, words in pen.rng.sample(tuple(CATEGORIES.values()), 14) if other != group]
    else:
        stem = pen.pick(_W[f"{held}largest_questions"])
        numbers = pen.rng.sample(range(1, (20, 100, 1000)[pen.below(3)]), count)
        right = str(max(numbers))
        wrong = [str(number) for number in numbers if str(number) != right]
    options = [right, *pen.rng.sample(wrong, count - 1)]
    pen.rng.shuffle(options)
    answer = TRAIN_LETTERS[options.index(right)]
    return Exercise("choice", f"{stem}\n{lettered(options)}", answer, line_of(options, right), chance=1 / count)


EXERCISES = {
    "sums": sum_exercise,
    "word_problems": word_problem,
    "spelling": spelling_exercise,
    "counting": counting_exercise,
    "choice": choice_exercise,
}


# --------------------------------------------------------------------------------------------------- drills

_DRILLS = world.wordings("drills")
Asked = tuple[str, str]  # a question and its option


def about_letters(pen: Pen) -> Exchange:
    """A letter of a word, or several words to spell."""
    if pen.maybe(0.4):
        words = pen.rng.sample(TRAIN_WORDS, 2 + pen.below(3))
        question = pen.pick(_DRILLS["several_questions"]).format(words=joined(words))
        return exchange(question, " ".join(map(sentence, words)))
    word, first = pen.pick(TRAIN_WORDS), pen.maybe(0.5)
    which = "first" if first else "last"
    question = pen.pick(_DRILLS["letter_questions"]).format(which=which, word=word)
    reply = f"{sentence(word)} The {which} letter is {word[0] if first else word[-1]}."
    return exchange(question, reply)


def dictionary(pen: Pen) -> Exchange:
    """Whether the model knows a word."""
    word = pen.pick(WORDS)
    question = pen.pick(_DRILLS["dictionary_questions"]).format(word=word)
    return exchange(question, f"The word {word} is in my dictionary.")


def options(pen: Pen) -> Exchange:
    """Questions about one list of lettered options."""
    make = pen.pick((_named, _named, _of_facts, _of_facts, _of_categories))
    values, asked = make(pen, pen.pick(OPTION_COUNTS))
    if make is _named and pen.maybe(0.7):
        some = [value for _, value in asked][: 2 + pen.below(3)]
        question = pen.pick(_DRILLS["several_letters_questions"]).format(values=joined(some))
        return exchange(f"{question}\n{lettered(values)}", "\n".join(line_of(values, value) for value in some))
    messages: Exchange = []
    for question, value in asked[: 2 + pen.below(2)]:
        text = question if messages else f"{question}\n{lettered(values)}"
        messages += exchange(text, line_of(values, value))
    return messages


def _named(pen: Pen, count: int) -> tuple[list[str], list[Asked]]:
    """Options that are asked for by name: values of a relation, or any words."""
    values = pen.rng.sample(WORDS if pen.maybe(0.5) else VALUES[pen.pick(RELATIONS)], count)
    questions = _DRILLS["named_questions"]
    return values, [(pen.pick(questions).format(value=value), value) for value in _shuffled(pen, values)]


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
    return _shuffled(pen, values), [(pen.say("questions", one, relation), one.fact(relation)) for one in characters]


def _of_categories(pen: Pen, count: int) -> tuple[list[str], list[Asked]]:
    """Words of different groups, and questions for the category of each."""
    found: dict[str, Asked] = {}
    for category in pen.rng.sample(CATEGORY_NAMES, len(CATEGORY_NAMES)):
        group, words = CATEGORIES[category]
        if group not in found and len(found) < count:
            question = pen.pick(_W["category_questions"]).format(category=category)
            found[group] = (question, pen.pick(words))
    asked = list(found.values())
    return _shuffled(pen, [value for _, value in asked]), asked


def _shuffled(pen: Pen, values: list[str]) -> list[str]:
    return pen.rng.sample(values, len(values))
