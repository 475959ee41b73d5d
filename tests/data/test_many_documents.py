"""Corpora of many documents: start, resume and memory of a loader; the index; more files than may be open."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from quern.bench.batches import write_empty_shards
from quern.data.loader import Loader, StreamLoader
from quern.data.shards import Corpus
from quern.data.token_file import ShardWriter
from quern.process import start
from tests.support.memory_corpus import memory_corpus

BOS = 0
DOCUMENTS, MEAN_TOKENS, CONTEXT, BATCH_ROWS = 1_000_000, 100, 2048, 32
MIDDLE = DOCUMENTS * MEAN_TOKENS // 2 // (CONTEXT + 1) // BATCH_ROWS


@pytest.mark.timeout(300)
def test_a_loader_of_a_million_documents_starts_resumes_and_stays_small(tmp_path: Path) -> None:
    """The bars are those of 10⁸ documents, docs/benchmarks/README.md: one group is in memory in both cases."""
    write_empty_shards(tmp_path, DOCUMENTS, MEAN_TOKENS, seed=0)
    order = {"folder": str(tmp_path), "context": CONTEXT, "batch_rows": BATCH_ROWS, "seed": 0}
    with start("quern.bench.batches", "loader", order) as process:
        answers = [process.ask(step) for step in (0, MIDDLE)]
    for found in answers:
        assert found["cpu_seconds"] < 10 and found.get("peak_bytes", 0) < 2e9 and found.get("own_bytes", 0) < 0.5e9


def shards(folder: Path, count: int, shard_tokens: int, masks: bool = False) -> list[list[int]]:
    rng = np.random.default_rng(0)
    docs = [[BOS, *rng.integers(1, 500, rng.integers(0, 30)).tolist()] for _ in range(count)]
    with ShardWriter(folder, "train", vocab_size=500, bos=BOS, fingerprint="a", shard_tokens=shard_tokens) as writer:
        for document in docs:
            writer.add(document, np.arange(len(document)) % 3 == 1 if masks else None)
    return docs


@pytest.mark.parametrize("shard_tokens", [1, 50, 10**6])
def test_the_index_of_files_is_that_of_arrays(tmp_path: Path, shard_tokens: int) -> None:
    docs = shards(tmp_path, 25, shard_tokens)
    plain, files = memory_corpus(docs), Corpus.open(tmp_path, "train")
    chosen = files.part(np.arange(25))
    assert len(files.parts) == {1: 25, 50: 7, 10**6: 1}[shard_tokens]
    for each in (0, 3):
        sizes = [sum(map(len, docs[:number])) + each * number for number in range(26)]
        for size in range(sizes[-1] + 3):
            expected = next((number for number in range(25) if sizes[number] >= size), 25)
            assert [one.at_size(size, each) for one in (plain, files, chosen)] == [expected] * 3
    for one in (plain, files, chosen):
        assert [one.tokens_before(number) for number in range(26)] == [sum(map(len, docs[:n])) for n in range(26)]
    some = np.random.default_rng(1).integers(0, 25, 100)
    assert np.array_equal(files.take(some), plain.take(some)) and np.array_equal(chosen.take(some), plain.take(some))
    for wrong in (-1, 25):
        with pytest.raises(IndexError, match="numbered 0 to 24"):
            files.take(np.array([0, wrong]))


@pytest.mark.parametrize("masks", [False, True])
def test_more_shards_than_open_files(tmp_path: Path, masks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.data.shards.FILES_MAPPED", 16)
    docs = shards(tmp_path, 120, 1, masks)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_already = max(map(int, os.listdir("/dev/fd")))  # by other tests of this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_already + 100, limits[1]))
    try:
        corpus = Corpus.open(tmp_path, "train")
        assert [corpus.gather(number).tolist() for number in range(120)] == docs
        loaders = [Loader(corpus, 200, 64)] + ([] if masks else [StreamLoader(corpus, 200, 64)])
        for loader in loaders:
            seen = {int(token) for step in range(loader.steps_per_epoch) for token in loader.batch(step).targets.flat}
            assert seen >= {token for document in docs for token in document[1:]} or masks
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_large_corpus_is_hashed_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = shards(tmp_path, 40, 100)
    path = tmp_path / "train-00003.bin"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="train-00003.bin is damaged or was swapped"):
        Corpus.open(tmp_path, "train")
    monkeypatch.setattr("quern.data.shards.VERIFIED_BYTES", 500)
    corpus = Corpus.open(tmp_path, "train")
    assert corpus.gather(0).tolist() == docs[0]
    with pytest.raises(ValueError, match="train-00003.bin is damaged or was swapped"):
        [corpus.gather(number) for number in range(40)]
