"""The tinyworld's skills: sums, word problems, spelling, letter counting, multiple choice, and the order of
things.

A Task is a question with its answer and the reply that shows the way: a tool call for sums, the word
spelled letter by letter for counting. What is held out for the evaluation is decided by hashes of the
content, never by chance:
- sums: one pair of operands in ten (whichever order, for + and *) appears in no training text at all;
- word problems: held-out operands, and one pair of (character, thing) in six, which no training problem
  uses;
- spelling and counting: one word in six is asked for in no training text. It is spelled in documents (a
  statement,   "river is spelled r-i-v-e-r"), for without that no tokenized model could know its letters; it
  is never counted;
- multiple choice: the wordings. The options are drawn anew each time.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from quern.text.tinyworld import plots
from quern.text.tinyworld.facts import (
    COLOURS,
    FIELDS,
    FOODS,
    HOBBIES,
    HOMES,
    KINDS,
    OTHER_FIELDS,
    RELATIONS,
    VALUES,
    WORKS,
    a,
    lines,
)
from quern.text.tinyworld.prose import Pen
from quern.text.tinyworld.wordings import HELD_OUT_QUESTIONS, QUESTIONS
from quern.text.tinyworld.words import CATALOGUE, THINGS, WORDS

LETTERS = ("A", "B", "C", "D")


def bucket(text: str, buckets: int) -> int:
    """A number below `buckets` that depends on the text alone, the same on any machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") % buckets


def sum_is_held_out(left: int, operator: str, right: int) -> bool:
    if operator in "+*" and left > right:
        left, right = right, left
    return bucket(f"{left} {operator} {right}", 10) == 0


def thing_is_held_out(name: str, things: str) -> bool:
    return bucket(f"{name} and {things}", 6) == 0


def is_asked_in_conversations(name: str, relation: str) -> bool:
    """Three of four facts are asked in conversations and quizzes; the others only in documents."""
    return bucket(f"ask {name} for {relation}", 4) != 0


HELD_OUT_WORDS = tuple(word for word in WORDS if bucket(f"spell {word}", 6) == 0)
TRAIN_WORDS = tuple(word for word in WORDS if bucket(f"spell {word}", 6) != 0)


@dataclass(frozen=True)
class Task:
    """A question, its answer, the reply, and the expression that the reply has the calculator work out."""

    kind: str
    question: str
    answer: str
    reply: str
    call: str | None = None
    choices: tuple[str, ...] | None = None
    chance: float = 0.0


# ------------------------------------------------------------------------------------------------- sums

OPERATOR_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
SUM_QUESTIONS = lines("""
    What is {left} {sign} {right}?
    What is {left} {word} {right}?
    What is {left} {word} {right}?
    How much is {left} {sign} {right}?
    How much is {left} {word} {right}?
    [Calculate|Compute|Work out] {left} {sign} {right}.
    [Calculate|Compute|Work out] {left} {word} {right}.
    Please [calculate|compute|work out] {left} {sign} {right}.
    Can you [calculate|compute|work out] {left} {sign} {right}?
    Can you tell me what {left} {word} {right} is?
    [Tell me|I need to know] what {left} {sign} {right} is.
    {left} {sign} {right} = ?
    {left}{sign}{right}
    """)
SUM_REPLIES = ("{left} {sign} {right} is {result}.", "{left} {sign} {right} = {result}.")


def result_of(left: int, operator: str, right: int) -> int:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left // right


def operands(pen: Pen, held_out: bool, operator: str, largest: int) -> tuple[int, int]:
    """Two operands of up to about `largest`; a quotient is exact, and every result is above 1."""
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


def sum_task(pen: Pen, held_out: bool = False) -> Task:
    """A sum of two numbers of up to four digits."""
    operator = pen.pick("++++---**/")
    left, right = operands(pen, held_out, operator, LARGEST[pen.below(len(LARGEST))])
    words = {"left": left, "sign": operator, "word": OPERATOR_WORDS[operator], "right": right}
    words["result"] = result_of(left, operator, right)
    question = pen.pick(SUM_QUESTIONS).format_map(words)
    reply = pen.pick(SUM_REPLIES).format_map(words)
    return Task("sums", question, str(words["result"]), reply, call=f"{left}{operator}{right}")


LARGEST = (20, 99, 99, 999, 999, 9999)

# ---------------------------------------------------------------------------------------- word problems

# operator (: divides) / problem / reply; each sentence of a problem names the character and the things
PROBLEMS: tuple[tuple[str, ...], ...] = tuple(
    tuple(reading.split(" / "))
    for reading in lines("""
    + / {name} has {left} {things} and [finds|buys|gets|picks up] {right} more. How many {things} does
        {name} have [now|in all]? / {name} has {result} {things}.
    + / {name} has {left} {things}, and {o_name} has {right} {things}. How many {things} do {name} and
        {o_name} have together? / Together they have {result} {things}.
    + / On {day} {name} [sold|bought|counted] {left} {things}, and the next day {right} more. How many
        {things} is that for {name} in all? / That is {result} {things} in all.
    - / {name} has {left} {things} and [gives|sells|lends] {right} of them to {o_name}. How many {things}
        does {name} have left? / {name} has {result} {things} left.
    - / {name} had {left} {things}, but {right} of them [were lost|were stolen|fell into the river]. How
        many {things} does {name} still have? / {name} still has {result} {things}.
    - / {name} wants {left} {things} and has only {right}. How many more {things} does {name} need? /
        {name} needs {result} more {things}.
    * / {name} has {left} [boxes|bags|baskets] with {right} {things} in each. How many {things} does {name}
        have in all? / {name} has {result} {things}.
    * / {name} [buys|packs|carries] {left} {things} every day. How many {things} does {name} have after
        {right} days? / After {right} days {name} has {result} {things}.
    : / {name} shares {left} {things} equally among {right} friends. How many {things} does each friend get
        from {name}? / Each friend gets {result} {things}.
    : / {name} puts {left} {things} into {right} [boxes|bags|baskets], the same number into each. How many
        {things} does {name} put into each? / {name} puts {result} {things} into each.
    """)
)


def word_problem(pen: Pen, held_out: bool = False) -> Task:
    """A little story with two numbers; the reply calls the calculator."""
    while True:
        character, things = pen.someone(), pen.pick(THINGS)
        if thing_is_held_out(character.name, things) == held_out:
            break
    sign, problem, reply = PROBLEMS[pen.below(len(PROBLEMS))]
    operator = "/" if sign == ":" else sign
    left, right = operands(pen, held_out, operator, pen.pick((20, 50, 99, 99, 300)) if operator in "+-" else 40)
    words = {**FIELDS[character.name], **OTHER_FIELDS[pen.other(character).name], "things": things}
    words |= {"left": str(left), "right": str(right), "result": str(result_of(left, operator, right))}
    words["day"] = pen.pick(plots.DAYS)
    return Task("word_problems", problem.format_map(words), words["result"], reply.format_map(words),
                call=f"{left}{operator}{right}")  # fmt: skip


# ---------------------------------------------------------------------------------- spelling and counting

SPELLING_QUESTIONS = lines("""
    How do you spell {word}?
    How is {word} spelled?
    [Spell|Please spell] {word}.
    Spell the word {word}.
    Can you spell {word}?
    Can you spell the word {word} [for me|letter by letter]?
    Please spell the word {word} [for me|letter by letter].
    What are the letters of {word}?
    """)
LENGTH_QUESTIONS = lines("""
    How many letters [are|are there] in {word}?
    How many letters does {word} have?
    Count the letters of {word}.
    How long is the word {word}?
    """)
COUNTING_QUESTIONS = lines("""
    How many times does the letter {letter} appear in {word}?
    How many {letter} are [in|there in] {word}?
    How often is the letter {letter} in {word}?
    Count the letter {letter} in {word}.
    How many times do you find the letter {letter} in the word {word}?
    """)


def times(count: int) -> str:
    return "1 time" if count == 1 else f"{count} times"


def spelled(word: str) -> str:
    return "-".join(word)


def counted(word: str, letter: str | None) -> str:
    """The word spelled, with a running number behind each letter that counts: b-e-r1-r2-y."""
    count = 0
    parts = []
    for symbol in word:
        count += letter in (None, symbol)
        parts.append(f"{symbol}{count}" if letter in (None, symbol) else symbol)
    return "-".join(parts)


def spelling_task(pen: Pen, held_out: bool = False) -> Task:
    word = pen.pick(HELD_OUT_WORDS if held_out else TRAIN_WORDS)
    question = pen.pick(SPELLING_QUESTIONS).format(word=word)
    return Task("spelling", question, word, f"The word {word} is spelled {spelled(word)}.")


def _by_count(words: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """(word, letter) pairs by how often the letter is in the word: 0 (letters of other words), 1, 2, 3."""
    found: list[list[tuple[str, str]]] = [[], [], [], []]
    for word in words:
        for letter in "abcdefghiklmnoprstuwy":
            if word.count(letter) < 4:
                found[word.count(letter)].append((word, letter))
    return tuple(tuple(pairs) for pairs in found)


PAIRS_BY_COUNT = {False: _by_count(TRAIN_WORDS), True: _by_count(HELD_OUT_WORDS)}
COUNTS = (0, 1, 1, 2, 2, 2, 3, 3)  # how often each count is asked for: 2 in three of eight
LENGTHS = tuple(len(word) for word in WORDS)
LENGTH_CHANCE = max(LENGTHS.count(length) for length in LENGTHS) / len(LENGTHS)


def counting_task(pen: Pen, held_out: bool = False) -> Task:
    """How often a letter is in a word, or how many letters the word has."""
    if pen.maybe(0.3):
        word = pen.pick(HELD_OUT_WORDS if held_out else TRAIN_WORDS)
        question = pen.pick(LENGTH_QUESTIONS).format(word=word)
        reply = f"{counted(word, None)}: the word {word} has {len(word)} letters."
        return Task("counting", question, str(len(word)), reply, chance=LENGTH_CHANCE)
    count = COUNTS[pen.below(len(COUNTS))]
    pairs = PAIRS_BY_COUNT[held_out][count]
    word, letter = pairs[pen.below(len(pairs))]
    question = pen.pick(COUNTING_QUESTIONS).format(word=word, letter=letter)
    reply = f"{counted(word, letter)}: the letter {letter} appears {times(count)}."
    return Task("counting", question, str(count), reply, chance=COUNTS.count(2) / len(COUNTS))


# ---------------------------------------------------------------------------------------- multiple choice

GROUPS = {
    **dict.fromkeys(("bird", "insect", "fish"), "animals"),
    **dict.fromkeys(("tree", "flower", "fruit", "vegetable", "spice", "drink"), "plants"),
    **dict.fromkeys(("metal", "kind of weather", "shape", "feeling", "part of the body"), "materials"),
    "game": "pastimes",
}
# category -> (group, words): the wrong options come from other groups, so that none of them is right too
CATEGORIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "an animal": ("animals", tuple(KINDS)),
    "a food": ("plants", tuple(FOODS)),
    "a colour": ("materials", tuple(COLOURS)),
    "a hobby": ("pastimes", tuple(HOBBIES)),
    "a trade": ("trades", tuple(WORKS)),
    "a village": ("villages", tuple(HOMES)),
    "a day of the week": ("calendar", plots.DAYS),
    "a month": ("calendar", plots.MONTHS),
} | {a(category): (GROUPS.get(category, "objects"), members) for category, members in CATALOGUE.items()}
CATEGORY_NAMES = tuple(CATEGORIES)
CATEGORY_MEMBERS = tuple(CATEGORIES.values())
CATEGORY_QUESTIONS = lines("[Which of these|Which one|Which word here] is {category}?")
HELD_OUT_CATEGORY_QUESTIONS = ("Find {category} in this list.", "Which of the four is {category}?")
LARGEST_QUESTIONS = lines("[Which|What] number is the [largest|biggest]?\nWhich of these numbers is the largest?")
HELD_OUT_LARGEST_QUESTIONS = (
    "Find the largest number in this list.",
    "Which of the four numbers is the biggest?",
)


def choice_task(pen: Pen, held_out: bool = False) -> Task:
    """A question with four lettered options; the reply is the letter."""
    kind = pen.rng.random()
    if kind < 0.6:
        character, relation = pen.someone(), pen.pick(RELATIONS)
        while not held_out and not is_asked_in_conversations(character.name, relation):
            character, relation = pen.someone(), pen.pick(RELATIONS)
        wordings = HELD_OUT_QUESTIONS if held_out else QUESTIONS
        stem = pen.pick(wordings[relation]).format_map(FIELDS[character.name])
        right = character.fact(relation)
        wrong = [value for value in VALUES[relation] if value not in (right, character.name)]
    elif kind < 0.85:
        category = pen.pick(CATEGORY_NAMES)
        stem = pen.pick(HELD_OUT_CATEGORY_QUESTIONS if held_out else CATEGORY_QUESTIONS).format(category=category)
        group, members = CATEGORIES[category]
        right = pen.pick(members)
        wrong = [pen.pick(words) for other, words in pen.rng.sample(CATEGORY_MEMBERS, 14) if other != group]
    else:
        stem = pen.pick(HELD_OUT_LARGEST_QUESTIONS if held_out else LARGEST_QUESTIONS)
        numbers = pen.rng.sample(range(1, (20, 100, 1000)[pen.below(3)]), 4)
        right = str(max(numbers))
        wrong = [str(number) for number in numbers if str(number) != right]
    options = [right, *pen.rng.sample(wrong, 3)]
    pen.rng.shuffle(options)
    answer = LETTERS[options.index(right)]
    question = "\n".join([stem, *(f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=True))])
    return Task("choice", question, answer, answer, choices=LETTERS, chance=1 / len(LETTERS))


TASKS = {
    "sums": sum_task,
    "word_problems": word_problem,
    "spelling": spelling_task,
    "counting": counting_task,
    "choice": choice_task,
}
