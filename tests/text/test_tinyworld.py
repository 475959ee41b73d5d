"""Tinyworld: same bytes for the same seed, one consistent world, true drills, an evaluation that training never saw."""

import collections
import hashlib
import itertools
import operator
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction

import pytest

from quern.text.chat import Message, parts, validate
from quern.text.tinyworld import corpus, skills
from quern.text.tinyworld.chat import EXCHANGES
from quern.text.tinyworld.corpus import QUESTION_KINDS, check
from quern.text.tinyworld.prose import Pen
from quern.text.tinyworld.skills import HELD_OUT_WORDS, PRACTICE_WORDS, TRAIN_WORDS, Exercise, is_asked_in_conversations
from quern.text.tinyworld.world import CAST, CHARACTERS, RELATIONS, VALUES, WORDINGS, WORDS


def sentences(text: str) -> set[str]:
    """The text's sentences, in lower case without punctuation; three words at least make a sentence.

    A line of lettered options is none: which options a list has, and in which order, is random.
    """
    found = set()
    for sentence in re.split(r"(?<=[.!?])\s+|\n", re.sub(r"(?m)^- .+ [A-E]$", "", text)):
        words = re.findall(r"[a-z0-9']+|[+*/=-]", sentence.lower())
        if len(words) >= 3:
            found.add(" ".join(words))
    return found


def spoken(message) -> str:
    return "\n".join(part["text"] for part in parts(message))


def judge(exercise: Exercise, reply: str) -> bool:
    return check(exercise.kind, exercise.question, exercise.answer, reply)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return list(corpus.documents(0, 4))


@pytest.fixture(scope="module")
def conversations():
    return list(corpus.conversations(0, 6000))


@pytest.fixture(scope="module")
def train_text(documents, conversations) -> list[str]:
    return documents + [spoken(message) for messages in conversations for message in messages]


@pytest.fixture(scope="module")
def train_sentences(train_text) -> set[str]:
    return set().union(*(sentences(text) for text in train_text))


@pytest.fixture(scope="module")
def questions() -> dict[str, list[Exercise]]:
    return {kind: corpus.questions(0, kind, 300) for kind in QUESTION_KINDS}


# ------------------------------------------------------------------------------------------ determinism


def test_same_arguments_same_bytes_whatever_the_hash_seed():
    code = (
        "import hashlib; from quern.text.tinyworld import corpus as w; h = hashlib.sha256(); "
        "[h.update(d.encode()) for d in w.documents(7, 0.2)]; "
        "h.update(repr(list(w.conversations(7, 200))).encode()); "
        "h.update(repr([w.questions(7, k, 20) for k in w.QUESTION_KINDS]).encode()); print(h.hexdigest())"
    )
    seeded = ({**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2"))
    assert len({subprocess.check_output([sys.executable, "-c", code], env=environment) for environment in seeded}) == 1


def test_a_larger_corpus_begins_with_the_smaller_one():
    small = list(corpus.documents(3, 0.1))
    assert list(itertools.islice(corpus.documents(3, 0.5), len(small))) == small
    assert sum(len(text.encode()) for text in small) >= 0.1e6 > sum(len(text.encode()) for text in small[:-1])


def test_seeds_and_splits_are_disjoint(documents):
    train = {hashlib.sha256(text.encode()).digest() for text in documents}
    for seed, split in ((0, "val"), (1, "val"), (1, "train"), (-1, "train")):
        other = list(corpus.documents(seed, 0.5, split))
        shared = sum(hashlib.sha256(text.encode()).digest() in train for text in other)
        allowed = 0 if split == "val" else 0.01 * len(other)  # two training seeds may share a short text
        assert shared <= allowed, f"{shared} documents of seed {seed}, {split} are also in train"
    assert list(corpus.documents(1, 0.01)) != list(corpus.documents(-1, 0.01))
    assert list(corpus.conversations(0, 9, "val")) != list(corpus.conversations(0, 9))


# ------------------------------------------------------------------------------------------ consistency

# sentences that tell a fact, found independently of the templates' fields
TOLD = {
    "kind": r"\b([A-Z][a-z]+) is an? (\w+)[.,]",
    "home": r"\b([A-Z][a-z]+) (?:lives in|comes from|calls) ([A-Z]\w+)",
    "work": r"\b([A-Z][a-z]+) works as an? (\w+)",
    "friend": r"\b([A-Z][a-z]+)'s (?:best|dearest|closest) friend is ([A-Z]\w+)",
    "food": r"\b([A-Z][a-z]+)'s favourite food (?:is|was) (\w+)",
    "colour": r"\b([A-Z][a-z]+)'s favourite colour (?:is|was) (\w+)",
    "hobby": r"\b([A-Z][a-z]+)'s hobby is (\w+)",
    "treasure": r"\b([A-Z][a-z]+) keeps an? (\w+)",
}


@pytest.mark.parametrize("relation", RELATIONS)
def test_no_text_contradicts_the_facts(train_text, relation):
    values = set(VALUES[relation])
    told = 0
    for text in train_text:
        for name, value in re.findall(TOLD[relation], text):
            if name in CHARACTERS and value in values:
                told += 1
                assert value == CHARACTERS[name].fact(relation), f"{name}: {value}, in {text!r}"
    assert told > 200


def test_every_fact_is_told_often(documents):
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    for text in documents:
        words = set(re.findall(r"[A-Za-z]+", text))
        for name in words & CHARACTERS.keys():
            for relation in RELATIONS:
                seen[name, relation] += CHARACTERS[name].fact(relation) in words
    assert min(seen[c.name, relation] for c in CAST for relation in RELATIONS) >= 40


def test_the_prose_is_well_formed(train_text):
    for text in train_text:
        assert "{" not in text and "}" not in text and "[" not in text and "  " not in text.replace("\n  ", "")
        slip = r"(?<!letter )(?<!many )\ba [aeiou]\w|\ban (?!hour)[^aeiou]| \.|\.\.|\b1 times|\s$"
        assert not re.search(slip, text), text


def test_documents_vary(documents):
    assert len(set(documents)) == len(documents)
    lengths = sorted(len(text) for text in documents)
    assert lengths[len(lengths) // 20] > 80 and 1200 < lengths[-1] < 6000
    # a sentence is a surface form once the facts' words are taken out
    facts = {value.lower() for relation in RELATIONS for value in VALUES[relation]}
    plain = {one for text in documents for one in sentences(text) if not re.search(r"\d|-", one)}
    assert len({" ".join("_" if word in facts else word for word in one.split()) for one in plain}) > 5000


# -------------------------------------------------------------------------------------- conversations


def test_conversations_are_valid_and_vary(conversations):
    for messages in conversations:
        validate(messages)
    assert len({repr(messages) for messages in conversations}) > 0.8 * len(conversations)
    assert sum(share for share, _ in EXCHANGES) == 100
    assert max(len(messages) for messages in conversations) >= 6
    turns = [turn for messages in conversations for turn in zip(messages, messages[1:], strict=False)]
    replies = [spoken(reply) for said, reply in turns if "who are you" in spoken(said).lower()]
    assert len(replies) > 10 and all(reply.startswith("I am quern, ") for reply in replies)


def test_every_tool_output_is_what_the_calculator_should_say(conversations):
    calls = collections.Counter()
    for messages in conversations:
        for message in messages:
            if isinstance(message["content"], str):
                continue
            tool, output, text = message["content"]
            assert [part["type"] for part in message["content"]] == ["tool", "output", "text"]
            ((left, sign, right),) = re.findall(r"^(\d+)([-+*/])(\d+)$", tool["text"])
            calls[sign] += 1
            assert COMPUTE[sign](Fraction(int(left)), Fraction(int(right))) == Fraction(output["text"])
            assert output["text"] in text["text"] and max(len(left), len(right)) <= 4
    assert all(calls[sign] > 100 for sign in "+-*/")


# ----------------------------------------------------------------------------------------- held out


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_no_training_sentence_is_in_the_evaluation(train_sentences, questions, kind):
    asked = set().union(*(sentences(one.question) for one in questions[kind]))
    assert asked and not asked & train_sentences
    assert len({one.question for one in questions[kind]}) == 300


def test_small_talk_is_answered_in_kind_and_its_held_out_slips_are_never_said(conversations, questions):
    plain = {text.lower().strip("!?.") for talk in conversations for m in talk if isinstance(text := m["content"], str)}
    assert {"hello", "hi", "help", "thanks", "who are you"} <= plain
    assert not plain & {one.question.lower().strip("!?.") for one in questions["small_talk"]}
    for one in questions["small_talk"]:
        assert judge(one, one.answer.upper()) and not judge(one, "! is error.")
    greeting = ("small_talk", "helol", "Hello! How can I help you?")
    assert check(*greeting, "hello, what would you like to know") and not check(*greeting, "You are welcome!")


def test_no_held_out_operands_in_training(train_text, questions):
    trained = set()
    words = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
    for text in train_text:
        for left, sign, right in re.findall(r"(\d+) ?([-+*/]|plus|minus|times|divided by) ?(\d+)", text):
            trained.add((int(left), words.get(sign, sign), int(right)))
    assert len(trained) > 4000
    assert not [operands for operands in trained if skills.sum_is_held_out(*operands)]
    for question in questions["sums"] + questions["word_problems"]:
        left, right = map(int, re.findall(r"\d+", question.question))
        signs = [sign for sign, result in COMPUTE.items() if result(left, right) == int(question.answer)]
        assert any(skills.sum_is_held_out(left, sign, right) and (left, sign, right) not in trained for sign in signs)


def test_held_out_words_are_spelled_in_documents_and_never_counted(documents, conversations):
    assert min(len(HELD_OUT_WORDS), len(PRACTICE_WORDS)) > 40
    assert len({*HELD_OUT_WORDS, *PRACTICE_WORDS, *TRAIN_WORDS}) == len(HELD_OUT_WORDS + PRACTICE_WORDS + TRAIN_WORDS)
    prose = "\n".join(documents)
    talk = "\n".join(spoken(message) for messages in conversations for message in messages)
    counts = set(re.findall(r"\b(?:[a-z]\d?-)+[a-z]\d?\b", prose + talk))
    counts = {re.sub(r"\d|-", "", chain) for chain in counts if re.search(r"\d", chain)}
    for word in HELD_OUT_WORDS + PRACTICE_WORDS:
        chain = "-".join(word)
        assert prose.count(chain) >= 5
        assert not re.search(rf"(?<![\w-]){chain}(?![\w-])", talk)
        assert word not in counts
    assert len(counts) > 150


def test_conversations_ask_about_names_behind_other_words(conversations):
    """A model that has seen a name only behind the words of the questions does not find it behind others."""
    asked = "\n".join(spoken(messages[0]) for messages in conversations)
    before = set(re.findall(rf"(\w+) (?:{'|'.join(one.name for one in CAST)})\b", asked))
    assert {"little", "old", "dear", "good", "clever", "friend", "certain"} <= before
    assert "our" not in before, "left to the evaluation"
    assert re.search(r"I want to ask you something\. .*\?", asked), "small talk alone would begin with I want"


def test_a_quarter_of_the_facts_is_never_asked_in_conversations(conversations):
    unasked = [(one, r) for one in CAST for r in RELATIONS if not is_asked_in_conversations(one.name, r)]
    assert 0.15 < len(unasked) / (len(CAST) * len(RELATIONS)) < 0.35
    said = {spoken(message) for messages in conversations for message in messages if message["role"] == "user"}
    for character, relation in unasked:
        for template in WORDINGS["questions"][relation][:6]:
            his = "her" if character.she else "his"
            assert template.format(name=character.name, his=his) not in said


# ------------------------------------------------------------------------------------------ judging


def test_the_replies_of_training_are_judged_right_and_others_wrong():
    for kind, make in skills.EXERCISES.items():
        for index in range(200):
            task = make(Pen(f"judge:{index}"))
            assert judge(task, task.reply) and (kind != "choice" or judge(task, task.reply.lower()))
            other = make(Pen(f"other:{index}"))
            assert judge(task, other.reply) == (other.answer == task.answer)
            assert not judge(task, "") and not judge(task, "I do not know.")


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "reply", "right"),
    [
        ("facts", "Where does Hugo live?", "Elmstead", "Hugo lives in Elmstead.", True),
        ("facts", "Where does Hugo live?", "Elmstead", "Hugo lives in Elmstead or Larkmoor.", False),
        ("facts", "Where does Hugo live?", "Elmstead", "Hugo lives in Elmsteads.", False),
        ("facts", "Who is Hugo's friend?", "Lottie", "Hugo's best friend is Lottie, not Vera.", False),
        ("facts", "Is Hugo a fox, an owl or some other animal?", "bear", "Hugo is a bear.", True),
        ("sums", "What is 9 - 4?", "4", "9-4", True),
        ("sums", "What is 900 + 400?", "1300", "That is 1,300.", True),
        ("sums", "What is 9 - 4?", "5", "5 is 9 - 4", False),
        ("sums", "What is 9 - 4?", "5", "It is 5.5.", False),
        ("spelling", "Spell river.", "river", "The word river is spelled r-i-v-e-r.", True),
        ("spelling", "Spell river.", "river", "The word river is spelled r-i-v-r.", False),
        ("counting", "How many r in berry?", "2", "b-e-r1-r2-y: the letter r appears 2 times.", True),
        ("counting", "How many r in berry?", "2", "b-e-r1-r2-y: the letter r appears 3 times.", False),
        ("choice", "Which?", "B", "- larkmoor b", True),
        ("choice", "Which?", "B", "(B).", True),
        ("choice", "Which?", "B", "- Larkmoor E", False),
        ("choice", "Which?", "B", "B or C", False),
        ("choice", "Which?", "B", "rob", False),
    ],
)
def test_check(kind, prompt, answer, reply, right):
    assert check(kind, prompt, answer, reply) is right


def test_multiple_choice_has_one_right_option_and_balanced_letters(questions):
    letters = collections.Counter(question.answer for question in questions["choice"])
    assert set(letters) == set("ABCD") and max(letters.values()) < 0.35 * 300
    for question in questions["choice"]:
        stem, *rest = question.question.split("\n")
        options = dict(map(letter_and_option, rest))
        assert list(options) == list("ABCD") and len(set(options.values())) == 4
        assert right(stem, list(options.values())) == [options[question.answer]]


def test_the_stated_chance_is_that_of_the_best_blind_guess():
    facts = corpus.questions(5, "facts", 1500)
    spelling = [one.question for one in corpus.questions(5, "spelling", 2000)]  # all: there are fewer
    assert 300 < len(spelling) == len({*spelling}) < 2000
    for relation in RELATIONS:
        column = [character.fact(relation) for character in CAST]
        chance = next(question.chance for question in facts if RELATION_OF[question.answer] == relation)
        assert chance == pytest.approx(max(map(column.count, column)) / len(CAST))
        assert chance >= 1 / len(VALUES[relation])
    counting = corpus.questions(5, "counting", 800)
    assert min(q.chance for q in counting) > 0
    answers = collections.Counter(q.answer for q in counting if "letters" not in q.question)
    assert max(answers.values()) / sum(answers.values()) < 0.5


# ------------------------------------------------------------------------------------------------------------ drills

RELATION_OF = {value: relation for relation in RELATIONS for value in VALUES[relation]}
COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
CATEGORY = re.compile(r"(?:Which (?:of these|one|word here|of the four) is|Find) (an? .+?)(?:\?| in this list\.)")


def exchanges(make, count: int) -> Iterator[list[Message]]:
    for index in range(count):
        validate(messages := make(Pen(f"drill:{index}")))
        yield messages


def letter_and_option(line: str) -> tuple[str, str]:
    found = re.fullmatch(r"- (.+) ([A-E])", line)
    assert found, line
    return found[2], found[1]


def right(question: str, options: list[str]) -> list[str]:
    """The options that answer a question, from the facts and the categories alone."""
    category = CATEGORY.fullmatch(question)
    if category:
        return [option for option in options if option in skills.CATEGORIES[category[1]][1]]
    if options[0].isdigit():
        return [max(options, key=int)]
    named = [option for option in options if re.search(rf"\b{option}\b", question)]
    if named and re.match(r"Which letter (has|stands)|Where is|Take|Choose|I choose", question):
        return named
    (name,) = CHARACTERS.keys() & set(re.findall(r"[A-Z][a-z]+", question))
    return [option for option in options if option == CHARACTERS[name].fact(RELATION_OF[options[0]])]


def test_every_question_about_a_list_has_one_right_option_and_the_reply_is_its_letter() -> None:
    letters: dict[int, collections.Counter[str]] = {}
    several = 0
    for messages in exchanges(skills.options, 1500):
        first, *lines = str(messages[0]["content"]).split("\n")
        options = dict(map(letter_and_option, lines))
        assert "".join(options) == "ABCDE"[: len(options)] and len(set(options.values())) == len(options) >= 2
        if re.match("Which letters|Name the letters", first):
            said = list(map(letter_and_option, str(messages[1]["content"]).split("\n")))
            assert len(said) >= 2 and all(options[letter] == value and value in first for letter, value in said)
            several += 1
            continue
        asked = [first, *(str(message["content"]) for message in messages[2::2])]
        for question, reply in zip(asked, messages[1::2], strict=True):
            letter, option = letter_and_option(str(reply["content"]))
            assert options[letter] == option
            assert right(question, list(options.values())) == [option], (question, options)
            for name in CHARACTERS.keys() & set(re.findall(r"[A-Z][a-z]+", question)) - set(options.values()):
                assert is_asked_in_conversations(name, RELATION_OF[option])
            letters.setdefault(len(options), collections.Counter())[letter] += 1
    assert several > 200 and sorted(letters) == [2, 3, 4, 5]
    for count, found in letters.items():  # no letter is a better guess than another
        assert max(found.values()) < 1.25 * sum(found.values()) / count


def test_no_drill_tells_a_letter_of_a_held_out_word() -> None:
    named = set()
    for make in (skills.about_letters, skills.dictionary):
        for messages in exchanges(make, 3000):
            question, reply = (str(message["content"]) for message in messages)
            words = [word for word in re.findall(r"[a-z]+", question) if word in WORDS and f"word {word} " in reply]
            assert words
            for word in words:
                if make is skills.dictionary:
                    named.add(word)
                    assert reply == f"The word {word} is in my dictionary."
                else:
                    assert word in TRAIN_WORDS and f"The word {word} is spelled {'-'.join(word)}." in reply
            if found := re.search(r"The (first|last) letter is (\w)\.", reply):
                assert found[2] == words[0][0 if found[1] == "first" else -1]
    assert {*HELD_OUT_WORDS, *PRACTICE_WORDS} <= named
