"""Cleaning: each step removes what it is for, by an independent count, and the counts add up."""

import random

import pytest

from quern.eval.task import find_contaminated
from quern.text.clean import steps
from quern.text.clean.steps import Cleaned, Step

WORDS = "the mill of stone and grain that grinds with water for a baker to have flour in winter".split()


def prose(seed: int, count: int = 60) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=count)) + f" {seed}."


def kept(step: Step, texts: list[str]) -> list[int]:
    return [number for number, text in enumerate(texts) if step.keep(text)]


def test_steps_come_in_order_and_their_counts_add_up() -> None:
    texts = ["tiny", prose(1), prose(2), prose(1), "tiny", prose(3) + " 2000"]
    year = Step("years", lambda text: "2000" not in text)
    cleaned = Cleaned(iter(texts), [steps.length(5), steps.exact_duplicates(), year])
    assert next(cleaned) == texts[1] and cleaned.documents == 2
    assert list(cleaned) == [texts[2]]
    assert cleaned.removed == {"length": 2, "exact duplicates": 1, "years": 1}
    assert cleaned.documents == len(texts) == 2 + sum(cleaned.removed.values())


def test_of_equal_documents_the_first_stays() -> None:
    texts = ["a b", "A b", " a b\n", "a  b", "\ud800", "\ud800", "a b"]
    assert kept(steps.exact_duplicates(), texts) == [0, 1, 3, 4]


def test_quality_keeps_prose_and_removes_what_is_not() -> None:
    good = prose(0)
    lines = good.split()
    other = (lines[:49], ["a"] * 100 + lines[:8], lines + ["antidisestablishmentarianism"] * 200)
    bad = [
        *map(" ".join, (*other, lines + ["17"] * 20, lines + ["#tag"] * 20)),
        "\n".join(f"- {word}" for word in lines),
        "\n".join(f"{word} and so on..." for word in lines[:8] * 3),
        good.replace("the ", "le ").replace("of ", "de ").replace("and ", "et ").replace("that ", "qui "),
    ]
    bad[-1] = bad[-1].replace("with ", "avec ").replace("have ", "avoir ").replace("to ", "pour ")
    assert kept(steps.quality(50), [good, *bad]) == [0]


def similarity(one: str, other: str) -> float:
    """Jaccard's, of the sets of runs of five words."""
    sets = [{tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (one.split(), other.split())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_near_duplicates_are_those_by_the_definition() -> None:
    pytest.importorskip("datasketch", reason="the extra `data` is not installed")
    texts = [prose(seed, 200) for seed in range(20)]
    near = [" ".join(text.split()[:-3] + ["almost", "the", "same"]).upper() for text in texts[:10]]
    far = [" ".join([*text.split()[:100], *prose(100 + seed, 100).split()]) for seed, text in enumerate(texts[:10])]
    assert all(similarity(a, b.lower()) > 0.93 for a, b in zip(texts, near, strict=False))
    assert all(similarity(a, b) < 0.5 for a, b in zip(texts, far, strict=False))
    assert kept(steps.near_duplicates(), [*texts, *near, *far]) == [*range(20), *range(30, 40)]
    assert kept(steps.near_duplicates(), ["one", "two", "one", "", "!"]) == [0, 1, 3]


def test_documents_with_questions_are_removed_and_then_none_is_found() -> None:
    questions = [prose(seed, 30) for seed in range(5)] + ["which stone grinds the grain finest", "too short"]
    written = [question.upper().replace(" ", ", ") for question in questions]
    hidden = [f"{prose(50 + number)} {text} {prose(60 + number)}" for number, text in enumerate(written)]
    texts = [prose(10), *hidden, " ".join(questions[0].split()[:12])]
    left = kept(steps.benchmark_questions(questions), texts)
    assert left == [0, len(questions), len(texts) - 1]
    assert find_contaminated(questions, texts) == [True] * 6 + [False]
    assert find_contaminated(questions, [texts[number] for number in left]) == [False] * 7
