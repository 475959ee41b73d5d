"""What is held out: every document is in one split, and few or odd documents still leave a sensible validation."""

import random
from collections.abc import Iterator

import pytest

from quern.stages.prepare import hold_out


def split(texts: list[str], megabytes: float = 0.5) -> tuple[list[str], list[str]]:
    held_out = hold_out(lambda: iter(texts), megabytes)
    train, val = list(held_out("train")), list(held_out("val"))
    assert sum(map(len, [*train, *val])) == sum(map(len, texts))
    return train, val


def size(texts: list[str]) -> int:
    return len("".join(texts).encode())


def every_twentieth(texts: list[str], most: float) -> list[str]:
    """The rule for large corpora, spelled out."""
    found: list[str] = []
    for text in texts[10::20]:
        if size(found) < most:
            found.append(text)
    return found


@pytest.mark.parametrize(("count", "megabytes"), [(60, 0.01), (5000, 0.5)])
def test_a_large_corpus_holds_out_every_twentieth_document(count: int, megabytes: float) -> None:
    rng = random.Random(count)
    texts = [f"{i} " + "wörd " * rng.randint(50, 400) for i in range(count)]
    train, val = split(texts, megabytes)
    assert val == every_twentieth(texts, megabytes * 1e6) and set(train) == set(texts) - set(val)


def test_a_large_corpus_is_not_read_to_its_end() -> None:
    def texts() -> Iterator[str]:
        for index in range(10**6):
            assert index < 5200
            yield f"{index} " + "x" * 2000

    held_out = list(hold_out(texts, 0.5)("val"))
    assert held_out[0].startswith("10 ") and 0.5e6 <= size(held_out) < 0.51e6


@pytest.mark.parametrize(
    ("texts", "least", "most"),
    [
        *(([f"{i} " + "some words " * 3000 for i in range(count)], 0.09, 0.101) for count in (1, 3, 10)),
        ([f"note {i}\n" for i in range(200)], 512 / 1690, 520 / 1690),
        (["a longer note " * 200, "another note\n" * 200, "ok"], 492 / 5402, 600 / 5402),
    ],
)
def test_few_or_tiny_documents_hold_out_the_end_of_the_text(texts: list[str], least: float, most: float) -> None:
    train, val = split(texts)
    assert "".join([*train, *val]) == "".join(texts)
    assert least <= size(val) / size(texts) <= most


@pytest.mark.parametrize("odd", ["ok", "much " * 100_000])
def test_one_odd_document_among_25_is_not_all_that_validates(odd: str) -> None:
    texts = [f"{i} " + "some words " * 100 for i in range(25)]
    texts[10] = odd
    train, val = split(texts)
    share = size(val) / size(texts)
    assert 0.02 < share < 0.16 and size(val) >= 512 and size(train) > size(val)
    assert "".join([*train, *val]) == "".join(texts)


@pytest.mark.parametrize("text", ["ab", "x" * 100, "世" * 400, "one two", "a\nb\nc\nd"])
def test_hardly_any_text_keeps_most_of_it_for_training(text: str) -> None:
    (train,), (val,) = split([text])
    assert train + val == text and len(train) >= len(val) >= 1


def test_it_is_at_most_what_was_asked_for() -> None:
    _, val = split(["some words " * 1000], megabytes=0.0001)
    assert 90 <= size(val) <= 100
