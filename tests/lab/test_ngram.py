"""Witten-Bell n-grams against a plain dictionary implementation, and on what must not count."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from quern.data.loader import Batch, Loader
from quern.data.packing import windows
from quern.data.shards import Corpus
from quern.lab.axes import ngram_bits
from tests.support.memory_corpus import memory_corpus

BOS, V = 0, 23
SIZES = np.array([0, *(1 + np.arange(V - 1) % 4)])


def corpus(seed: int, documents: int) -> Corpus:
    rng = np.random.default_rng(seed)
    return memory_corpus([[BOS, *(1 + rng.geometric(0.3, n) % (V - 1))] for n in rng.integers(2, 40, documents)])


def batches() -> list[Batch]:
    loader = Loader(corpus(0, 60), 16, 4, seed=1)
    return [loader.batch(step) for step in range(12)]


def histories(batch: Batch) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each target that counts, and the tokens before it since the last BOS of its row."""
    for tokens, targets, mask in zip(batch.tokens, batch.targets, batch.mask, strict=True):
        history: tuple[int, ...] = ()
        for token, target, counts in zip(tokens, targets, mask, strict=True):
            history = (int(token),) if token == BOS else (*history, int(token))
            if counts:
                yield history, int(target)


def plain(train: list[Batch], val: list[Batch], order: int) -> float:
    follows: defaultdict[tuple[int | None, ...], Counter[int]] = defaultdict(Counter)
    for batch in train:
        for history, target in histories(batch):
            for n in range(order):
                follows[_context(history, n)][target] += 1

    def p(history: tuple[int, ...], target: int, n: int) -> float:
        if n < 0:
            return 1 / V
        found = follows[_context(history, n)]
        lower = p(history, target, n - 1)
        return (found[target] + len(found) * lower) / (found.total() + len(found)) if found else lower

    assert sum(p((BOS, 3), target, order - 1) for target in range(V)) == pytest.approx(1)
    scored = [(h, target) for batch in val for h, target in histories(batch) if SIZES[target]]
    bits = sum(-math.log2(p(history, target, order - 1)) for history, target in scored)
    return bits / sum(int(SIZES[target]) for _, target in scored)


def _context(history: tuple[int, ...], n: int) -> tuple[int | None, ...]:
    """The last n tokens; None where there are fewer."""
    padded = (*[None] * n, *history)
    return padded[len(padded) - n :]


def test_equals_a_plain_dictionary() -> None:
    val = list(windows(corpus(7, 20), 16, rows=4))
    found = ngram_bits(batches(), val, SIZES, BOS)
    assert found == pytest.approx({order: plain(batches(), val, order) for order in (1, 2, 3)})


def test_what_is_masked_counts_nothing() -> None:
    val = list(windows(corpus(7, 20), 16, rows=4))
    masked = [replace(batch, mask=np.zeros_like(batch.mask)) for batch in batches()]
    assert ngram_bits([*batches(), *masked], [*val, replace(val[0], mask=np.zeros_like(val[0].mask))], SIZES, BOS) == (
        ngram_bits(batches(), val, SIZES, BOS)
    )
    with pytest.raises(ValueError, match="n-grams need targets"):
        ngram_bits(masked, val, SIZES, BOS)
