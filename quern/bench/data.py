"""Benchmarks of everything before the model: tokenizer training, encoding, packing, loading. No tensors are
involved.

Megabytes are 10^6 bytes of UTF-8. Shards are read from a temporary folder whose pages are in memory, as
after the first epoch of a run. Packing and loading run on one thread; `prefetch` is one thread beside the
consumer's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quern.bench.record import Measure, Outcome, Setup, alternate, rates, ratios, repeated, seconds_of
from quern.data.loader import Loader, prefetch
from quern.data.packing import METHODS, pack
from quern.data.shards import Corpus, ShardWriter
from quern.text.tokenizer import Tokenizer

CONTEXT = 512
BATCH_ROWS = 32
MEAN_DOCUMENT_TOKENS = 500
STEP_SECONDS = 0.02  # what the consumer of `loading` does with a batch: about a step on an accelerator


def tokenizer(setup: Setup) -> Outcome:
    """Training: reading, splitting, counting and merging; MB/s of the text it was given."""
    material = setup.material
    texts, vocab_size = material.texts, material.vocab_size
    taken = alternate(setup.rounds, {"train": lambda: seconds_of(lambda: Tokenizer.train(texts, vocab_size))})["train"]
    reached = material.tokenizer.vocab_size
    return Outcome(
        [
            Measure("tokenizer training", "MB/s", rates(material.bytes / 1e6, taken)),
            Measure("time", "s", taken),
        ],
        {"text": material.name, "bytes": material.bytes, "documents": len(texts), "vocabulary": reached},
    )


def encode(setup: Setup) -> Outcome:
    """Encoding document by document on one thread, and all at once on the machine's threads."""
    material = setup.material
    texts, threads, made = material.texts, max(1, setup.machine.threads), material.tokenizer
    tokens = sum(len(made.encode(text)) for text in texts)
    jobs: dict[str, Callable[[], float]] = {
        "one": lambda: seconds_of(lambda: [made.encode(text) for text in texts]),
        "batch": lambda: seconds_of(lambda: made.encode_batch(texts, threads)),
    }
    taken = alternate(setup.rounds, jobs)
    megabytes = material.bytes / 1e6
    return Outcome(
        [
            Measure("one thread", "MB/s", rates(megabytes, taken["one"])),
            Measure("one thread", "tokens/s", rates(tokens, taken["one"])),
            Measure(f"batch, {threads} threads", "MB/s", rates(megabytes, taken["batch"])),
            Measure("batch / one thread", "×", ratios(taken["one"], taken["batch"])),
        ],
        {
            "text": material.name,
            "bytes": material.bytes,
            "tokens": tokens,
            "bytes_per_token": round(material.bytes / tokens, 3),
            "vocabulary": made.vocab_size,
        },
    )


def packing(setup: Setup) -> Outcome:
    """Packing alone by each method, and packing with loading from shards; rows of 513 tokens.

    Two corpora: documents whose lengths spread as those of web pages do (log-normal, 500 tokens on
    average), and the text's own documents, whose number per row decides what packing costs.
    """
    wanted = 200_000 if setup.quick else 20_000_000
    measures: list[Measure] = []
    settings: dict[str, Any] = {"row_tokens": CONTEXT + 1, "batch_rows": BATCH_ROWS}
    corpora = {"500-token documents": _web_like(setup, wanted), setup.material.name: _own(setup, wanted)}
    for name, documents in corpora.items():
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        tokens = int(lengths.sum())
        jobs: dict[str, Callable[[], float]] = {method: _packing_job(lengths, method) for method in METHODS}
        settings[name] = {
            "documents": len(lengths),
            "tokens": tokens,
            **{m: _shares(lengths, m) for m in METHODS},
        }
        with shards(documents) as corpus:
            steps = _epoch_steps(corpus, setup.seed)
            jobs["load"] = _reading_job(corpus, setup.seed, steps)
            taken = alternate(setup.rounds, jobs)
        loaded = steps * BATCH_ROWS * (CONTEXT + 1)
        for method in METHODS:
            note = ", ".join(f"{key} {share:.4f}" for key, share in settings[name][method].items())
            measures.append(Measure(f"{name}: pack, {method}", "tokens/s", rates(tokens, taken[method]), note))
        measures.append(Measure(f"{name}: pack and load, best-fit", "tokens/s", rates(loaded, taken["load"])))
    return Outcome(measures, settings)


def loading(setup: Setup) -> Outcome:
    """Batches made when asked for against batches made ahead, and how long a step waits for one made
    ahead."""
    wanted, steps = (200_000, 8) if setup.quick else (20_000_000, 400)
    with shards(_web_like(setup, wanted)) as corpus:
        steps = min(steps, _epoch_steps(corpus, setup.seed))
        jobs: dict[str, Callable[[], float]] = {
            "direct": _reading_job(corpus, setup.seed, steps),
            "prefetched": lambda: seconds_of(lambda: _read_ahead(corpus, setup.seed, steps)),
            "wait": lambda: _waiting(corpus, setup.seed, min(steps, 50)),
        }
        taken = alternate(setup.rounds, jobs)
    tokens = steps * BATCH_ROWS * (CONTEXT + 1)
    waiting = tuple(1e3 * one for one in taken["wait"])
    return Outcome(
        [
            Measure("as asked for", "tokens/s", rates(tokens, taken["direct"])),
            Measure("prefetched", "tokens/s", rates(tokens, taken["prefetched"])),
            Measure("prefetched / as asked for", "×", ratios(taken["direct"], taken["prefetched"])),
            Measure("wait beside steps of 20 ms", "ms a batch", waiting),
        ],
        {"batch_rows": BATCH_ROWS, "context": CONTEXT, "steps": steps, "corpus_tokens": corpus.num_tokens},
    )


def _web_like(setup: Setup, tokens: int) -> list[np.ndarray]:
    """Documents of random ids with BOS first; lengths log-normal (σ = 1) with a mean of 500, at least 2."""
    numbers = np.random.Generator(np.random.Philox(setup.seed))
    mean = np.log(MEAN_DOCUMENT_TOKENS) - 0.5
    count = max(1, tokens // MEAN_DOCUMENT_TOKENS)
    lengths = np.maximum(2, numbers.lognormal(mean, 1.0, count)).astype(np.int64)
    ids = numbers.integers(1, 8192, int(lengths.sum()), dtype=np.int64)
    ends = np.cumsum(lengths)
    ids[ends - lengths] = 0
    return np.split(ids, ends[:-1])


def _own(setup: Setup, tokens: int) -> list[np.ndarray]:
    """The text's own documents, repeated until there are that many tokens; id 0 stands for BOS."""
    made = setup.material.tokenizer
    documents = [np.array([0, *made.encode(text)], dtype=np.int64) for text in setup.material.texts]
    mean = sum(len(ids) for ids in documents) / len(documents)
    return repeated(documents, max(1, int(tokens / mean)))


@contextmanager
def shards(documents: list[np.ndarray]) -> Iterator[Corpus]:
    """The documents as a corpus of shards in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="quern-bench-") as folder:
        with ShardWriter(Path(folder), "train", vocab_size=8192, bos=0, fingerprint="bench") as writer:
            for ids in documents:
                writer.add(ids)
        yield Corpus.open(Path(folder), "train", fingerprint="bench")


def _packing_job(lengths: np.ndarray, method: str) -> Callable[[], float]:
    return lambda: seconds_of(lambda: pack(lengths, CONTEXT + 1, method))


def _reading_job(corpus: Corpus, seed: int, steps: int) -> Callable[[], float]:
    return lambda: seconds_of(lambda: _read(corpus, seed, steps))


def _shares(lengths: np.ndarray, method: str) -> dict[str, float]:
    report = pack(lengths, CONTEXT + 1, method).report()
    names = {"utilisation": "utilisation", "padding": "padding_share", "cropped": "cropped_share"}
    return {name: round(report[key], 5) for name, key in names.items()}


def _epoch_steps(corpus: Corpus, seed: int) -> int:
    """Whole batches in the first epoch."""
    return max(1, Loader(corpus, CONTEXT, BATCH_ROWS, seed).steps_per_epoch - 1)


def _read(corpus: Corpus, seed: int, steps: int) -> None:
    """A loader from scratch, so that packing is part of it."""
    loader = Loader(corpus, CONTEXT, BATCH_ROWS, seed)
    for step in range(steps):
        loader.batch(step)


def _read_ahead(corpus: Corpus, seed: int, steps: int) -> None:
    for _ in prefetch(Loader(corpus, CONTEXT, BATCH_ROWS, seed), 0, steps):
        pass


def _waiting(corpus: Corpus, seed: int, steps: int) -> float:
    """Mean seconds a consumer waits for a batch, the first of which it waits for in any case."""
    waited, batches = 0.0, prefetch(Loader(corpus, CONTEXT, BATCH_ROWS, seed), 0, steps + 1)
    next(batches)
    for _ in range(steps):
        time.sleep(STEP_SECONDS)
        waited += seconds_of(lambda: next(batches))
    return waited / steps
