"""Laws: batches depend on (seed, step) alone; not on ranks, accumulation, resuming or how files are cut. And
an epoch holds every token of the corpus once, however long the documents. Each holds for a corpus that is shuffled as a
whole, and for one that is shuffled in groups.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from quern.data.loader import DOCUMENT_SIZE, Batch, Loader
from quern.data.packing import METHODS
from quern.data.shards import Corpus
from quern.data.token_file import ShardWriter
from tests.support.batches import epoch_of, sized, token_hash
from tests.support.memory_corpus import memory_corpus

BOS = 0
CONTEXT, BATCH_ROWS, SEED = 32, 12, 7
STEPS = 48  # more than two epochs of the corpus below
GROUP = 80_000  # about 78 of the documents below
RANKS = (2, 5, 12)  # dividing the rows of a batch, not dividing them, and one row each
FIELDS = ("tokens", "targets", "mask")

Make = Callable[..., Loader]


def documents() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[BOS, *rng.integers(1, 500, n).tolist()] for n in rng.lognormal(2.5, 1.0, 300).astype(int).tolist()]


def corpus(kind: str) -> Corpus:
    docs, rng = documents(), np.random.default_rng(1)
    masks = [(rng.random(len(doc)) < 0.3) & (np.arange(len(doc)) > 0) for doc in docs]
    return memory_corpus(docs, masks if kind == "sft" else None)


def differing(one: Batch, other: Batch) -> int:
    """How many entries differ; every entry counts when the shapes do."""
    pairs = [(getattr(one, f), getattr(other, f)) for f in FIELDS]
    return sum(int((a != b).sum()) if a.shape == b.shape else a.size for a, b in pairs)


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(np.concatenate([getattr(b, f) for b in batches]) for f in FIELDS))


def rank_deviation(make: Make) -> int:
    """Rank r of N has the rows r, r + N, …"""
    total = 0
    for ranks in RANKS:
        alone, workers = make(), [make() for _ in range(ranks)]
        for step, (rank, worker) in itertools.product(range(STEPS), enumerate(workers)):
            whole = alone.batch(step)
            own = Batch(*(getattr(whole, field)[rank::ranks] for field in FIELDS))
            total += differing(worker.batch(step, rank, ranks), own)
    return total


def accumulation_deviation(make: Make) -> int:
    """Over micro-batches of several numbers of rows."""
    alone, other = make(), make()
    return sum(
        differing(joined(list(other.batch(step).split(rows))), alone.batch(step))
        for rows, step in itertools.product((1, 5, 12, 99), range(STEPS))
    )


def resume_deviation(make: Make) -> int:
    """Resumes at every step, for four steps each; the next resumption begins in the middle of them."""
    uninterrupted = make()
    expected = [uninterrupted.batch(step) for step in range(STEPS)]
    total = 0
    for start in range(STEPS):
        fresh = make()
        total += sum(differing(fresh.batch(step), expected[step]) for step in range(start, min(start + 4, STEPS)))
    return total


@pytest.fixture(params=[("pretraining", None), ("sft", None), ("pretraining", GROUP), ("sft", GROUP)])
def make(request: pytest.FixtureRequest) -> Make:
    kind_of_corpus, group_size = request.param

    def build(packing: str = "best-fit") -> Loader:
        data = corpus("pretraining" if packing == "stream" else kind_of_corpus)
        return sized(40, 20)(data, CONTEXT, BATCH_ROWS, SEED, packing, group_size=group_size)

    assert epoch_of(build(), STEPS - 1) >= 2, "the law must cross epochs"
    return build


EQUAL = "every token, target and mask equal"
LAWS: dict[str, tuple[Callable[[Make], int], str]] = {
    "N ranks read the batch of one rank": (rank_deviation, EQUAL),
    "micro-batches of any size make up the batch": (accumulation_deviation, EQUAL),
    "the loader resumed at any step, twice, across epochs = uninterrupted": (resume_deviation, "bit for bit"),
}


@pytest.mark.parametrize("packing", METHODS)
@pytest.mark.parametrize("name", LAWS)
def test_batches(make, packing, name, law):
    measure, bar = LAWS[name]
    law(name, measure(partial(make, packing)), unit=bar)


def write(folder: Path, docs: list[list[int]], shard_tokens: int = 10**9, vocab_size: int = 500) -> Path:
    options = {"vocab_size": vocab_size, "bos": BOS, "fingerprint": "f"}
    with ShardWriter(folder, "train", shard_tokens, **options) as writer:
        for document in docs:
            writer.add(document)
    return folder


@pytest.mark.parametrize("group_size", [None, GROUP])
def test_shard_files(tmp_path: Path, law, group_size):
    docs = documents()
    expected = Loader(memory_corpus(docs), CONTEXT, BATCH_ROWS, SEED, group_size=group_size)
    differ = 0
    for shard_tokens, vocab_size in ((10**9, 500), (300, 70_000)):
        folder = write(tmp_path / f"{shard_tokens}-{vocab_size}", docs, shard_tokens, vocab_size)
        loader = Loader(Corpus.open(folder, "train"), CONTEXT, BATCH_ROWS, SEED, group_size=group_size)
        differ += sum(token_hash(loader, step) != token_hash(expected, step) for step in range(STEPS))
    law("batches from one shard, many shards and memory", differ, unit="hashes equal")


def test_groups_come_in_order_once_and_then_in_another_order():
    docs = documents()
    loader = Loader(memory_corpus(docs), CONTEXT, 1, SEED, group_size=GROUP)
    sizes = np.array([len(doc) + DOCUMENT_SIZE for doc in docs])
    groups = ((np.cumsum(sizes) - sizes) // GROUP).tolist()
    of_token = {tuple(doc[1:5]): group for group, doc in zip(groups, docs, strict=True) if len(doc) > 4}
    orders: list[list[int]] = [[] for _ in range(6)]
    for step in itertools.count():
        epoch = epoch_of(loader, step)
        if epoch == len(orders):
            break
        row = loader.batch(step).targets[0].tolist()
        if tuple(row[:4]) in of_token:
            orders[epoch].append(of_token[tuple(row[:4])])
    orders = [[group for group, _ in itertools.groupby(order)] for order in orders]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders) and orders[0] == [0, 1, 2, 3]
    assert len(set(map(tuple, orders))) > 2


def test_each_group_is_shuffled_in_its_own_order():
    docs = [[BOS, *[number] * 33] for number in range(1, 101)]  # 50 in a group, each fills a row
    loader = Loader(memory_corpus(docs), 33, 50, SEED, group_size=50 * (34 + DOCUMENT_SIZE))
    orders = [(loader.batch(step).targets[:, 5] - 1) % 50 for step in range(4)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("group_size", [None, GROUP])
def test_other_seeds_give_other_batches(law, group_size):
    data, hashes = corpus("pretraining"), set()
    for seed in range(8):
        loader = Loader(data, CONTEXT, BATCH_ROWS, seed, group_size=group_size)
        hashes |= {token_hash(loader, step) for step in range(STEPS)}
    law("batches of eight seeds differ", 8 * STEPS - len(hashes), unit="equal batches")


def coverage_deviation(loader: Loader, docs: list[list[int]]) -> int:
    """How many tokens (BOS apart) the first epoch shows too often or too seldom, by the pairs they stand in.

    A pair is a token with the one before it; where a document was cut, BOS stands for the one before, except in a
    stream.
    """
    expected = Counter(t for doc in docs for t in doc[1:])
    pairs = {p for doc in docs for p in itertools.pairwise(doc)}
    seen: Counter[int] = Counter()
    strange = 0
    for step in range(loader.steps_per_epoch):
        if epoch_of(loader, step) == 0:
            batch = loader.batch(step)
            rows = np.concatenate([batch.tokens[:, :1], batch.targets], axis=1)
            seen.update(batch.targets[batch.targets != BOS].tolist())
            for row in rows.tolist():
                strange += sum(p not in pairs for p in itertools.pairwise(row) if p[0] != BOS and p[1] != BOS)
    wrong = (expected - seen).total() + (seen - expected).total()
    return wrong + strange


@pytest.mark.parametrize("chunk_documents", [90, 10_000])
@pytest.mark.parametrize("packing", ["best-fit", "greedy-pad", "first-fit-decreasing", "stream"])
@pytest.mark.parametrize("group_size", [None, GROUP, 1000])
def test_every_token_once(packing, chunk_documents, group_size, law):
    docs = [*documents(), [BOS, *range(600, 3000)]]
    kind = sized(chunk_documents)
    loader = kind(memory_corpus(docs), CONTEXT, 1, SEED, packing, group_size=group_size)
    name, bar = "an epoch holds every token once, however long the documents", "tokens missing or repeated"
    law(name, coverage_deviation(loader, docs), unit=bar)


def test_the_coverage_check_catches_lost_tokens():
    docs = documents()
    data = memory_corpus(docs)
    assert coverage_deviation(Loader(data, CONTEXT, 1, SEED, too_long="crop"), docs) > 0
    assert coverage_deviation(Loader(data, CONTEXT, 1, SEED), [*docs, docs[5]]) > 0
