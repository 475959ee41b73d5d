"""The sample for the tokenizer: from all of the text, as large as asked for, the same each time, never in memory."""

import itertools
import tracemalloc
from collections.abc import Iterator

import pytest

from quern.stages.tokenizers import sampled


def numbered(count: int, repeats: int = 20) -> Iterator[str]:
    return (f"{number:07d} stone mill " * repeats for number in range(count))


def numbers(texts: Iterator[str]) -> list[int]:
    return [int(text[:7]) for text in texts]


def test_a_large_text_is_sampled_everywhere_by_the_seed() -> None:
    seen: list[int] = []
    found = {seed: numbers(sampled(lambda: numbered(10_000), 1.0, seed, seen.append)) for seed in ("a", "b")}
    assert seen[9_999] == sum(len(text) for text in numbered(10_000)) == 3_800_000
    assert found["a"] == numbers(sampled(lambda: numbered(10_000), 1.0, "a", seen.append)) != found["b"]
    for chosen in found.values():
        assert chosen == sorted(set(chosen))
        for quarter in range(4):
            here = sum(quarter * 2_500 <= number < (quarter + 1) * 2_500 for number in chosen)
            assert abs(here - 2_500 / 3.8) < 50
        steps = {later - number for number, later in itertools.pairwise(chosen)}
        assert steps >= {2, 3, 4, 5}, "not every fourth"


def test_a_single_long_document_is_sampled_in_pieces() -> None:
    text = "".join(f"{number} " for number in range(1_000_000))
    chosen = list(sampled(lambda: iter([text]), 2.0, "seed", lambda done: None))
    assert 1.9e6 < sum(map(len, chosen)) < 2.1e6 and all(piece in text for piece in chosen)
    assert int(chosen[-1].split()[-1]) > 800_000
    assert list(sampled(lambda: iter([text]), 0.01, "seed", lambda done: None)), "at least one piece"


@pytest.mark.parametrize("megabytes", [0.1, 20.0])
def test_memory_does_not_grow_with_text_or_sample(megabytes: float) -> None:
    tracemalloc.start()
    try:
        chosen = sampled(lambda: numbered(5_000, 400), megabytes, "seed", lambda done: None)
        size = sum(map(len, chosen))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert abs(size - megabytes * 1e6) < 2 * 7_600 + 0.02 * megabytes * 1e6 and peak < 1e6
