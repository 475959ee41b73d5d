"""The stream loader: every token once per epoch in whole documents, and one global batch for any ranks and files."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice

import numpy as np
import pytest

from quern.data.batch import Batch, prefetch
from quern.data.shards import Corpus
from quern.data.stream_loader import StreamLoader
from tests.support.batches import epoch_of, token_hash

BOS = 0


def document(index: int, length: int) -> list[int]:
    """Each token identifies its document and its place: 100 · (index + 1) + place."""
    return [BOS] + [100 * (index + 1) + place for place in range(1, length)]


def documents_of(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    lengths = np.random.default_rng(seed).integers(1, longest, count).tolist()
    return [document(i, n) for i, n in enumerate(lengths)]


def corpus_of(count: int, longest: int = 40) -> Corpus:
    return Corpus.from_arrays(documents_of(count, longest))


def stream_of(loader: StreamLoader, tokens: int) -> list[int]:
    """The first tokens of the stream, in row order."""
    found: list[int] = []
    for step in count():
        found += loader.batch(step).tokens.reshape(-1).tolist()
        if len(found) >= tokens:
            return found[:tokens]
    raise AssertionError


def split_at_bos(tokens: list[int]) -> list[list[int]]:
    starts = [i for i, token in enumerate(tokens) if token == BOS] + [len(tokens)]
    assert starts[0] == 0
    return [tokens[a:b] for a, b in zip(starts, starts[1:], strict=False)]


@pytest.mark.parametrize(("context", "rows"), [(1, 1), (7, 3), (64, 2), (5000, 1)])
def test_an_epoch_is_every_document_whole_in_another_order(context: int, rows: int) -> None:
    documents = documents_of(50)
    loader = StreamLoader(Corpus.from_arrays(documents), context, rows, seed=3)
    total = sum(map(len, documents))
    stream = stream_of(loader, 3 * total)
    orders = []
    for epoch in range(3):
        seen = split_at_bos(stream[epoch * total : (epoch + 1) * total])
        assert sorted(seen) == sorted(documents)
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] != documents


def test_targets_are_the_next_tokens_and_all_count() -> None:
    loader = StreamLoader(corpus_of(30), 24, 3)
    batches = [loader.batch(step) for step in range(20)]
    flat = np.concatenate([b.tokens.reshape(-1) for b in batches])
    targets = np.concatenate([b.targets.reshape(-1) for b in batches])
    assert (flat[1:] == targets[:-1]).all()  # across rows, batches and epochs
    assert all(b.mask.all() and b.weight is None for b in batches)
    assert {b.tokens.dtype for b in batches} == {b.targets.dtype for b in batches} == {np.dtype(np.int32)}
    assert {b.tokens.shape for b in batches} == {(3, 24)}


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    forward = StreamLoader(corpus_of(40), 16, 4, seed=1)
    hashes = [token_hash(forward, step) for step in range(30)]
    backward = StreamLoader(corpus_of(40), 16, 4, seed=1)
    assert [token_hash(backward, step) for step in reversed(range(30))] == hashes[::-1]
    assert len(set(hashes)) == 30
    assert token_hash(StreamLoader(corpus_of(40), 16, 4, seed=2), 0) != hashes[0]


def test_positions_and_steps_per_epoch() -> None:
    corpus = corpus_of(40)
    loader = StreamLoader(corpus, 16, 4)
    per_epoch = -(-corpus.num_tokens // 64)
    assert loader.steps_per_epoch == per_epoch
    assert epoch_of(loader, per_epoch - 1) == 0 and epoch_of(loader, per_epoch) == 1
    assert loader.report()["documents"] == 40 and loader.report()["utilisation"] == 1


def test_one_loader_serves_several_threads_and_prefetch() -> None:
    plain = StreamLoader(corpus_of(60), 16, 4)
    expected = [token_hash(plain, step) for step in range(60)]
    shared = StreamLoader(corpus_of(60), 16, 4)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(partial(token_hash, shared), range(60))) == expected

    def same(batch: Batch, step: int) -> bool:
        return np.array_equal(batch.tokens, plain.batch(step).tokens)

    assert all(same(batch, step) for step, batch in enumerate(islice(prefetch(shared, 0, None), 10)))


def test_wrong_settings_are_refused() -> None:
    corpus = corpus_of(5)
    masked = Corpus.from_arrays([[0, 1, 2]], [[False, True, True]])
    with pytest.raises(ValueError, match="learns every token: pack a corpus with masks by first-fit-decreasing"):
        StreamLoader(masked, 8, 1)
    with pytest.raises(ValueError, match=r"context \(0\) and batch_rows \(1\) must be at least 1"):
        StreamLoader(corpus, 0, 1)
    with pytest.raises(ValueError, match="seed -1 is refused"):
        StreamLoader(corpus, 8, 1, seed=-1)
    with pytest.raises(ValueError, match="rank 2 of 2 cannot read a batch of 4 rows"):
        StreamLoader(corpus, 8, 4).batch(0, 2, 2)
    with pytest.raises(ValueError, match="step -1 is negative"):
        StreamLoader(corpus, 8, 4).batch(-1)
