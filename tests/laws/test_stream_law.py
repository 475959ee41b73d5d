"""Laws of the stream: N ranks read one rank's batch, micro-batches make it up, a resumed loader goes on with it, and an
epoch holds every token once as a target.

Each check is shown to catch a loader that breaks it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from quern.data.batch import Batch
from quern.data.shards import Corpus
from quern.data.stream_loader import StreamLoader

BOS, CONTEXT, BATCH_ROWS, SEED = 0, 48, 12, 7
STEPS = 30  # more than two epochs of the corpus below

Make = Callable[[], StreamLoader]


def documents() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[BOS, *rng.integers(1, 500, n).tolist()] for n in rng.lognormal(2.5, 1.0, 300).astype(int).tolist()]


def make(kind: type[StreamLoader] = StreamLoader, group_size: int | None = None) -> StreamLoader:
    return kind(Corpus.from_arrays(documents()), CONTEXT, BATCH_ROWS, SEED, group_size=group_size)


def differing(one: Batch, other: Batch) -> int:
    pairs = ((one.tokens, other.tokens), (one.targets, other.targets), (one.mask, other.mask))
    return sum(int((a != b).sum()) if a.shape == b.shape else max(a.size, b.size) for a, b in pairs)


def joined(parts: list[Batch]) -> Batch:
    return Batch(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "targets", "mask")))


def rank_deviation(make: Make) -> int:
    alone, total = make(), 0
    for ranks in (1, 2, 3, 4, 5, 6, 12):
        workers = [make() for _ in range(ranks)]
        for step in range(STEPS):
            whole = alone.batch(step)
            for rank, worker in enumerate(workers):
                rows = slice(rank, None, ranks)
                expected = Batch(whole.tokens[rows], whole.targets[rows], whole.mask[rows])
                total += differing(worker.batch(step, rank, ranks), expected)
    return total


def accumulation_deviation(make: Make) -> int:
    alone, other = make(), make()
    return sum(
        differing(joined(list(other.micro_batches(step, rows))), alone.batch(step))
        for rows in (1, 2, 5, 12, 99)
        for step in range(STEPS)
    )


def resume_deviation(make: Make) -> int:
    """Begins at every step, and there goes on for three."""
    whole = make()
    expected = [whole.batch(step) for step in range(STEPS)]
    total = 0
    for start in range(STEPS):
        fresh = make()
        total += sum(differing(fresh.batch(s), expected[s]) for s in range(start, min(start + 3, STEPS)))
    return total


def coverage_deviation(make: Make) -> int:
    """Tokens that the first two epochs show as an input too often or too seldom, or after another than their own."""
    loader, docs = make(), documents()
    expected: Counter = Counter()
    for document in docs:
        expected.update(zip(document, [*document[1:], BOS], strict=True))
    total = sum(map(len, docs))
    rows = joined([loader.batch(step) for step in range(STEPS)])
    tokens, targets = rows.tokens.reshape(-1), rows.targets.reshape(-1)
    wrong = 0
    for epoch in range(2):
        part = slice(epoch * total, (epoch + 1) * total)
        seen = Counter(zip(tokens[part].tolist(), targets[part].tolist(), strict=True))
        wrong += (expected - seen).total() + (seen - expected).total()
    return wrong


LAWS: dict[str, tuple[Callable[[Make], int], str]] = {
    "N ranks read the batch of one rank: stream": (rank_deviation, "every token, target and mask equal"),
    "micro-batches of any size make up the batch: stream": (
        accumulation_deviation,
        "every token, target and mask equal",
    ),
    "the loader resumed at any step, across epochs = uninterrupted: stream": (resume_deviation, "bit for bit"),
    "an epoch holds every token once: stream": (coverage_deviation, "tokens missing or repeated"),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_stream(name: str, law: Callable[..., None]) -> None:
    assert make().position(STEPS - 1)[0] >= 2, "the law must cross epochs"
    measure, bar = LAWS[name]
    deviation = sum(measure(partial(make, group_size=size)) for size in (None, 80_000, 10_000))
    assert deviation == 0
    law(name, deviation, bar)


class BrokenRanks(StreamLoader):
    """Rank r reads the r-th part of the batch."""

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        whole, size = super().batch(step), self.batch_rows // ranks
        rows = slice(rank * size, (rank + 1) * size)
        return Batch(whole.tokens[rows], whole.targets[rows], whole.mask[rows])


class BrokenSplit(StreamLoader):
    """The last micro-batch comes first."""

    def micro_batches(self, step: int, rows: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        return reversed(list(super().micro_batches(step, rows, rank, ranks)))


class BrokenResume(StreamLoader):
    """The stream depends on what was read before."""

    read = 0

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        self.read += 1
        return super().batch(self.read, rank, ranks)


class BrokenStart(StreamLoader):
    """Each row begins a token late."""

    def _fill(self, start: int, out: np.ndarray) -> None:
        super()._fill(start + start // self.context, out)


@pytest.mark.parametrize(
    ("measure", "kind"),
    [
        (rank_deviation, BrokenRanks),
        (accumulation_deviation, BrokenSplit),
        (resume_deviation, BrokenResume),
        (coverage_deviation, BrokenStart),
    ],
)
def test_the_checks_catch_a_broken_stream(measure: Callable[[Make], int], kind: type[StreamLoader]) -> None:
    assert measure(lambda: make(kind)) > 0
