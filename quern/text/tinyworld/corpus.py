"""The built-in corpus: a world of animals in a valley, generated from a seed, with its own held-out questions.

`documents` are for pretraining, `conversations` for fine-tuning, `questions` and `check` for evaluation. The facts of
the world are constant (world.py). The seed decides which stories are told. Every function depends only on its
arguments and returns the same bytes on any machine. Document i depends on (split, seed, i) only, so a larger corpus
begins with the smaller one. The text is not natural: a model trained on it knows only this valley.

No training text contains the wordings of the evaluation's fact and choice questions, its operands, or its (word,
question) pairs; skills.py describes how each is held out. The splits share the facts and differ in their seeds.

Source: a model can retrieve facts by a question when many wordings tell them (Allen-Zhu and Li, "Physics of Language
Models: Part 3.1", 2023).
"""

import re
from collections.abc import Callable, Iterator
from functools import partial

from quern.terminal import ascii_signs
from quern.text.chat import Message
from quern.text.tinyworld import lessons, prose, skills
from quern.text.tinyworld.chat import conversation, fits, held_out_small_talk
from quern.text.tinyworld.prose import Pen
from quern.text.tinyworld.skills import Exercise
from quern.text.tinyworld.world import CHARACTERS, RELATIONS, VALUES, blind_guess, upper_first

# The percentage of documents of each kind, the kind of text for reports, and the function that makes one
DOCUMENTS: tuple[tuple[int, str, Callable[[Pen], str]], ...] = (
    (11, "stories", prose.story),
    (10, "biographies", prose.biography),
    (3, "lists", prose.profile),
    (5, "dialogue", prose.dialogue),
    (3, "letters", prose.letter),
    (3, "letters", prose.diary),
    (3, "biographies", prose.comparison),
    (2, "lists", lessons.roll),
    (2, "biographies", prose.village),
    (13, "questions", lessons.questions_and_answers),
    (8, "questions", lessons.quiz),
    (6, "arithmetic", lessons.arithmetic),
    (4, "arithmetic", lessons.problems),
    (8, "spelling", lessons.spelling),
    (5, "spelling", lessons.counting),
    (1, "lists", lessons.order),
    (2, "lists", lessons.catalogue),
    (1, "lists", lessons.opposites),
    (1, "lists", lessons.errands),
    (8, "lists", lessons.shelves),
    (1, "lists", lessons.about_quern),
)
KINDS_OF_TEXT = tuple(dict.fromkeys(kind for _, kind, _ in DOCUMENTS))
KIND_CHARACTERS = 50_000


def documents(seed: int, megabytes: float, split: str = "train") -> Iterator[str]:
    """Yields documents of about 50 to 1,400 bytes.

    The hash of a text assigns one text in eight to validation, so no seed puts a validation text into training.

    Args:
        megabytes: The least total size, in 10^6 UTF-8 bytes.
        split: "train" or "val".
    """
    return (text for _, text in documents_of_kinds(seed, megabytes, split))


def documents_of_kinds(seed: int, megabytes: float, split: str = "train") -> Iterator[tuple[str, str]]:
    """Yields `documents`, each after its kind, one of KINDS_OF_TEXT."""
    left, index = megabytes * 1e6, 0
    while left > 0:
        pen = Pen(f"documents:{split}:{seed}:{index}")
        _, kind, make = pen.pick_by_share(DOCUMENTS)
        text = upper_first(make(pen))
        index += 1
        if (skills.bucket(text, 8) == 0) == (split == "val"):
            yield kind, text
            left -= len(text.encode("utf-8"))


def conversations(seed: int, count: int, split: str = "train") -> Iterator[list[Message]]:
    """Yields `count` conversations for fine-tuning, each a list of messages for chat.render."""
    return (conversation(Pen(f"conversations:{split}:{seed}:{index}")) for index in range(count))


def kinds_of_text(seed: int = 0) -> dict[str, str]:
    """Generated text of each of KINDS_OF_TEXT, for reports such as the tokenizer's compression."""
    texts = {}
    for kind in KINDS_OF_TEXT:
        makers = [make for _, of, make in DOCUMENTS if of == kind]
        found: list[str] = []
        size = 0
        while size < KIND_CHARACTERS:
            found.append(makers[len(found) % len(makers)](Pen(f"kinds:{kind}:{seed}:{len(found)}")))
            size += len(found[-1])
        texts[kind] = "\n\n".join(found)
    return texts


def _fact_question(pen: Pen) -> Exercise:
    character, relation = pen.someone(), pen.pick(RELATIONS)
    text, reply = (pen.say(what, character, relation) for what in ("held_out_questions", "answers"))
    return Exercise("facts", text, character.fact(relation), reply, chance=blind_guess(relation))


HELD_OUT: dict[str, Callable[[Pen], Exercise]] = {
    "facts": _fact_question,
    **{kind: partial(make, held_out=True) for kind, make in skills.EXERCISES.items()},
    "small_talk": held_out_small_talk,
}
QUESTION_KINDS = tuple(HELD_OUT)


def questions(seed: int, kind: str, count: int) -> list[Exercise]:
    """`count` different questions of a kind, none of which is in a training text; all of a kind that has fewer."""
    found: dict[str, Exercise] = {}
    index = last_new = 0
    while len(found) < count and index - last_new <= 2000:
        exercise = HELD_OUT[kind](Pen(f"questions:{kind}:{seed}:{index}"))
        if exercise.question not in found:
            found[exercise.question], last_new = exercise, index
        index += 1
    return list(found.values())


_WORD = re.compile(r"[a-z]+")
_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")  # the minus of "9-4" is not a sign
_SPELLED = re.compile(r"[a-z](?:-[a-z])+")
_LETTER = re.compile(r"(?<!\w)([A-Ea-e])\W*$")  # "- Larkmoor B", "B", "(b)."
_RELATION_OF = {value.lower(): relation for relation in RELATIONS for value in VALUES[relation]}


def _check_fact(question: str, answer: str, reply: str) -> bool:
    """The reply contains the answer and no other value of the relation, except for names in the question."""
    words, asked = (set(_WORD.findall(text.lower())) for text in (reply, question))
    answer = answer.lower()
    relation = _RELATION_OF[answer]
    rivals = {value.lower() for value in VALUES[relation]} - {answer}
    if relation == "friend":
        rivals -= asked & {name.lower() for name in CHARACTERS}
    return answer in words and not rivals & words


def check(kind: str, question: str, answer: str, reply: str) -> bool:
    """Whether a reply (the text of the assistant's whole turn) is right. Case and punctuation are ignored.

    What must equal the answer depends on the kind. facts: see _check_fact. sums, word problems, counting: the last
    number. spelling: the last spelled word (r-i-v-e-r). choice: the letter at the end of the reply. small_talk: the
    whole reply.
    """
    if kind == "facts":
        return _check_fact(question, answer, reply)
    if kind == "small_talk":
        return fits(reply, answer)
    if kind == "spelling":
        spelled = _SPELLED.findall(reply.lower())
        return bool(spelled) and spelled[-1].replace("-", "") == answer
    if kind == "choice":
        letter = _LETTER.search(reply)
        return letter is not None and letter.group(1).upper() == answer
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", ascii_signs(reply)))
    return bool(numbers) and numbers[-1] == answer
