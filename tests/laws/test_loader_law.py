"""Laws: batches depend on (seed, step) alone; not on ranks, accumulation, resuming or how files are cut. And
an epoch holds every token of the corpus once, however long the documents.

Each check is shown to catch a loader that breaks it (`Broken…`).
"""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quern.data.loader import Batch, Loader
from quern.data.packing import METHODS
from quern.data.shard_writer import ShardWriter
from quern.data.shards import Corpus

BOS = 0
CONTEXT, BATCH_ROWS, SEED = 32, 12, 7
STEPS = 48  # more than two epochs of the corpus below
FIELDS = ("tokens", "targets", "mask")

Make = Callable[..., Loader]


def documents() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[BOS, *rng.integers(1, 500, n).tolist()] for n in rng.lognormal(2.5, 1.0, 300).astype(int).tolist()]


def masked(docs: list[list[int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [(rng.random(len(d)) < 0.3) & (np.arange(len(d)) > 0) for d in docs]


def corpus(kind: str) -> Corpus:
    docs = documents()
    return Corpus.from_arrays(docs, masked(docs) if kind == "sft" else None)


def differing(one: Batch, other: Batch) -> int:
    """How many entries differ; every entry counts when the shapes do."""
    pairs = [(getattr(one, f), getattr(other, f)) for f in FIELDS]
    return sum(int((a != b).sum()) if a.shape == b.shape else a.size for a, b in pairs)


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(np.concatenate([getattr(b, f) for b in batches]) for f in FIELDS))


def interleaved(parts: list[Batch]) -> Batch:
    """Puts rank r's rows back at r, r + N, …"""
    out = joined(parts)
    order = np.concatenate([np.arange(rank, BATCH_ROWS, len(parts)) for rank in range(len(parts))])
    back = np.argsort(order)
    return Batch(out.tokens[back], out.targets[back], out.mask[back])


def rank_deviation(make: Make, ranks: int) -> int:
    alone = make()
    workers = [make() for _ in range(ranks)]
    total = 0
    for step in range(STEPS):
        parts = [worker.batch(step, rank, ranks) for rank, worker in enumerate(workers)]
        total += differing(interleaved(parts), alone.batch(step))
    return total


def accumulation_deviation(make: Make, rows: int) -> int:
    alone, other = make(), make()
    return sum(differing(joined(list(other.micro_batches(s, rows))), alone.batch(s)) for s in range(STEPS))


def resume_deviation(make: Make) -> int:
    """Resumes at every step, and resumes the resumed one again three steps later."""
    uninterrupted = make()
    expected = [uninterrupted.batch(step) for step in range(STEPS)]
    total = 0
    for start in range(STEPS):
        for begin in (start, start + 3):
            fresh = make()
            for step in range(begin, min(begin + 4, STEPS)):
                total += differing(fresh.batch(step), expected[step])
    return total


@pytest.fixture(params=["pretraining", "sft"])
def make(request: pytest.FixtureRequest) -> Make:
    data = corpus(request.param)

    def build(kind: type[Loader] = Loader, packing: str = "best-fit", **options) -> Loader:
        return kind(data, CONTEXT, BATCH_ROWS, SEED, packing, chunk_documents=90, buffer=20, **options)

    assert build().position(STEPS - 1)[0] >= 2, "the law must cross epochs"
    return build


@pytest.mark.parametrize("packing", METHODS)
def test_ranks(make, packing, law):
    worst = max(rank_deviation(lambda: make(packing=packing), ranks) for ranks in (1, 2, 3, 4, 5, 6, 12))
    assert worst == 0
    law("N ranks read the batch of one rank", worst, "every token, target and mask equal")


def test_accumulation(make, law):
    worst = max(accumulation_deviation(make, rows) for rows in (1, 2, 5, 6, 12, 99))
    assert worst == 0
    law("micro-batches of any size make up the batch", worst, "every token, target and mask equal")


@pytest.mark.parametrize("packing", METHODS)
def test_resume(make, packing, law):
    deviation = resume_deviation(lambda: make(packing=packing))
    assert deviation == 0
    law("the loader resumed at any step, twice, across epochs = uninterrupted", deviation, "bit for bit")


def test_shard_files(tmp_path: Path, law):
    docs = documents()
    expected = Loader(Corpus.from_arrays(docs), CONTEXT, BATCH_ROWS, SEED)
    differ = 0
    for shard_tokens, vocab_size in ((10**9, 500), (300, 500), (60, 500), (300, 70_000)):
        folder = tmp_path / f"{shard_tokens}-{vocab_size}"
        options = {"vocab_size": vocab_size, "bos": BOS, "fingerprint": "f"}
        with ShardWriter(folder, "train", None, shard_tokens, **options) as writer:
            for document in docs:
                writer.add(document)
        loader = Loader(Corpus.open(folder, "train"), CONTEXT, BATCH_ROWS, SEED)
        differ += sum(loader.token_hash(step) != expected.token_hash(step) for step in range(STEPS))
    assert differ == 0
    law("batches from one shard, many shards and memory", differ, "hashes equal")


def coverage_deviation(loader: Loader, docs: list[list[int]]) -> int:
    """How many tokens (BOS apart) the first epoch shows too often or too seldom, by the pairs they stand in.

    A pair is a token with the one before it; where a document was cut, BOS stands for the one before.
    """
    expected = Counter(t for doc in docs for t in doc[1:])
    pairs = {p for doc in docs for p in itertools.pairwise(doc)}
    seen: Counter[int] = Counter()
    strange = 0
    for step in range(loader.steps_per_epoch):
        if loader.position(step)[0] == 0:
            batch = loader.batch(step)
            rows = np.concatenate([batch.tokens[:, :1], batch.targets], axis=1)
            seen.update(rows[rows != BOS].tolist())
            for row in rows.tolist():
                strange += sum(p not in pairs for p in itertools.pairwise(row) if p[0] != BOS and p[1] != BOS)
    wrong = (expected - seen).total() + (seen - expected).total()
    return wrong + strange


@pytest.mark.parametrize("chunk_documents", [90, 10_000])
@pytest.mark.parametrize("packing", ["best-fit", "greedy-pad", "first-fit-decreasing"])
def test_every_token_once(packing, chunk_documents, law):
    docs = [*documents(), [BOS, *range(600, 3000)]]
    loader = Loader(Corpus.from_arrays(docs), CONTEXT, 1, SEED, packing, chunk_documents=chunk_documents)
    deviation = coverage_deviation(loader, docs)
    assert deviation == 0
    law("an epoch holds every token once, however long the documents", deviation, "tokens missing or repeated")


def test_hash_sees_every_field():
    loader = Loader(corpus("sft"), CONTEXT, BATCH_ROWS, SEED)
    other = Loader(corpus("pretraining"), CONTEXT, BATCH_ROWS, SEED)
    assert loader.token_hash(0) == loader.token_hash(0) != loader.token_hash(1) != other.token_hash(1)


class BrokenRanks(Loader):
    """Each rank shuffles for itself, as a loader seeded with its rank would."""

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        other = Loader(self.corpus, self.context, self.batch_rows, self.seed + rank, self.packing)
        return super().batch(step, rank, ranks) if rank == 0 else other.batch(step, rank, ranks)


class BrokenAccumulation(Loader):
    """Drops the rows that do not fill a micro-batch."""

    def micro_batches(self, step: int, rows: int, rank: int = 0, ranks: int = 1):
        return (part for part in super().micro_batches(step, rows, rank, ranks) if part.rows == rows)


class BrokenResume(Loader):
    """Counts its own calls instead of looking at the step, so it starts over after a resume."""

    calls = -1

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        self.calls += 1
        return super().batch(self.calls, rank, ranks)


class BrokenCut(Loader):
    """Loses what best-fit cuts off, as packers that discard tails do."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._keeps_tails = False


def test_the_coverage_check_catches_lost_tokens():
    docs = documents()
    data = Corpus.from_arrays(docs)
    assert coverage_deviation(BrokenCut(data, CONTEXT, 1, SEED), docs) > 0
    assert coverage_deviation(Loader(data, CONTEXT, 1, SEED, too_long="crop"), docs) > 0
    assert coverage_deviation(Loader(data, CONTEXT, 1, SEED), [*docs, docs[5]]) > 0


def test_the_checks_catch_a_broken_loader(make):
    assert rank_deviation(lambda: make(BrokenRanks), 2) > 0
    assert accumulation_deviation(lambda: make(BrokenAccumulation), 5) > 0
    assert resume_deviation(lambda: make(BrokenResume)) > 0
