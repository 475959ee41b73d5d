"""The stream loader: every token once per epoch in whole documents. tests/laws/ has its ranks, resuming and targets."""

from itertools import count

import numpy as np
import pytest

from quern.data.shards import Corpus
from quern.data.stream_loader import StreamLoader

BOS = 0


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
    lengths = np.random.default_rng(0).integers(1, 40, 50).tolist()
    documents = [[BOS, *range(100 * number + 1, 100 * number + length)] for number, length in enumerate(lengths)]
    loader = StreamLoader(Corpus.from_arrays(documents), context, rows, seed=3)
    total = sum(map(len, documents))
    stream = stream_of(loader, 3 * total)
    orders = [split_at_bos(stream[epoch * total : (epoch + 1) * total]) for epoch in range(3)]
    assert all(sorted(seen) == sorted(documents) for seen in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0] != documents
    report = loader.report()
    assert (report["documents"], report["rows"], report["utilisation"]) == (50, -(-total // context), 1)


def test_a_corpus_with_masks_is_refused() -> None:
    masked = Corpus.from_arrays([[0, 1, 2]], [[False, True, True]])
    with pytest.raises(ValueError, match="learns every token: pack a corpus with masks by first-fit-decreasing"):
        StreamLoader(masked, 8, 1)
