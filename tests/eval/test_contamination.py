"""Which questions share a passage with the training text: planted ones are found, others are not."""

import random

import pytest

from quern.eval.contamination import find_contaminated
from quern.text.clean.steps import SHORTEST, WORDS

WORD_LIST = [f"word{number}" for number in range(500)]


def text(rng: random.Random, words: int) -> list[str]:
    return rng.choices(WORD_LIST, k=words)


def test_planted_passages_are_found_and_only_they() -> None:
    rng = random.Random(0)
    documents = [text(rng, 400) for _ in range(20)]
    questions = [text(rng, 30) for _ in range(40)]
    for number in range(0, 40, 4):
        document, at = documents[number % 20], rng.randrange(300)
        questions[number][5 : 5 + WORDS] = document[at : at + WORDS]
    for number in range(1, 40, 4):  # one word less is no passage
        document, at = documents[number % 20], rng.randrange(300)
        questions[number][5 : 5 + WORDS] = [*document[at : at + WORDS - 1], "other"]
    found = find_contaminated([" ".join(words) for words in questions], (" ".join(words) for words in documents))
    assert [number for number, flag in enumerate(found) if flag] == list(range(0, 40, 4))


@pytest.mark.parametrize(
    ("question", "document", "shared"),
    [
        ("How many legs does a spider have?", "… HOW many legs, does a spider have! Eight.", True),
        ("How many legs does a spider have?", "How many legs does a fly have?", False),
        ("Who? Me.", "who me who me who me", False),
        ("", "anything", False),
        ("Ça va bien, 你好 世界 et toi aujourd'hui", "ça va bien 你好 世界 et toi aujourd'hui encore", True),
    ],
)
def test_short_questions_must_be_in_a_document_as_a_whole(question: str, document: str, shared: bool) -> None:
    assert find_contaminated([question], [document]) == [shared]
    assert SHORTEST <= WORDS


def test_two_documents_do_not_make_a_passage() -> None:
    words = [f"w{number}" for number in range(WORDS)]
    assert find_contaminated([" ".join(words)], [" ".join(words[:7]), " ".join(words[7:])]) == [False]
    assert find_contaminated([" ".join(words)], [" ".join(words)]) == [True]
