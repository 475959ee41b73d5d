"""Benchmarks of the steps before the model: tokenizer training, encoding, packing, loading. No tensors are involved.

Megabytes are 10⁶ bytes of UTF-8. Shards are read from a temporary folder whose pages are in memory, as after the first
epoch of a run. Packing and loading run on one thread; `prefetch` is one thread beside that of the consumer.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quern.bench.record import Measure, Outcome, Setup, alternate, rates, ratios, scaled, seconds_of
from quern.data.loader import Loader, prefetch
from quern.data.packing import METHODS, pack
from quern.data.shards import Corpus, ShardWriter
from quern.text.tokenizer import Tokenizer

CONTEXT, BATCH_ROWS = 512, 32
MEAN_DOCUMENT_TOKENS = 500
STEP_SECONDS = 0.02
"""How long the consumer of `loading` is busy with a batch: about a step on an accelerator."""


def tokenizer(setup: Setup) -> Outcome:
    """Training: reading, splitting, counting and merging, in MB/s of the text."""
    material = setup.material
    texts, vocab_size = material.texts, material.vocab_size
    seconds = setup.seconds({"train": lambda: Tokenizer.train(texts, vocab_size)})["train"]
    reached = material.tokenizer.vocab_size
    return Outcome(
        [Measure("tokenizer training", "MB/s", rates(material.bytes / 1e6, seconds)), Measure("time", "s", seconds)],
        {"text": material.name, "bytes": material.bytes, "documents": len(texts), "vocabulary": reached},
    )


def encode(setup: Setup) -> Outcome:
    """Encoding: one document after another on one thread, and all at once on the machine's threads."""
    material = setup.material
    texts, threads, made = material.texts, max(1, setup.machine.threads), material.tokenizer
    tokens, megabytes = sum(len(made.encode(text)) for text in texts), material.bytes / 1e6
    taken = setup.seconds(
        {"one": lambda: [made.encode(text) for text in texts], "batch": lambda: made.encode_batch(texts, threads)}
    )
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

    Two corpora: documents with lengths like those of web pages (log-normal, 500 tokens on average), and the documents
    of the text. The number of documents in a row determines the cost of packing.
    """
    wanted = 200_000 if setup.quick else 20_000_000
    measures: list[Measure] = []
    settings: dict[str, Any] = {"row_tokens": CONTEXT + 1, "batch_rows": BATCH_ROWS}
    for name, documents in (
        ("500-token documents", _web_like(setup, wanted)),
        (setup.material.name, _own(setup, wanted)),
    ):
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        reports = {method: pack(lengths, CONTEXT + 1, method).report() for method in METHODS}
        keys = {"utilisation": "utilisation", "padding": "padding_share", "cropped": "cropped_share"}
        shares = {m: {short: round(report[key], 5) for short, key in keys.items()} for m, report in reports.items()}
        tokens = int(lengths.sum())
        settings[name] = {"documents": len(lengths), "tokens": tokens, **shares}
        with shards(documents) as corpus:
            steps = _epoch_steps(corpus, setup.seed)
            jobs = {method: partial(pack, lengths, CONTEXT + 1, method) for method in METHODS}
            taken = setup.seconds({**jobs, "load": partial(_read, corpus, setup.seed, steps)})
        for method in METHODS:
            note = ", ".join(f"{key} {share:.4f}" for key, share in shares[method].items())
            measures.append(Measure(f"{name}: pack, {method}", "tokens/s", rates(tokens, taken[method]), note))
        loaded = rates(steps * BATCH_ROWS * (CONTEXT + 1), taken["load"])
        measures.append(Measure(f"{name}: pack and load, best-fit", "tokens/s", loaded))
    return Outcome(measures, settings)


def loading(setup: Setup) -> Outcome:
    """Batches made on request and batches made ahead, and how long a step waits for one made ahead."""
    wanted, steps = (200_000, 8) if setup.quick else (20_000_000, 400)
    with shards(_web_like(setup, wanted)) as corpus:
        steps = min(steps, _epoch_steps(corpus, setup.seed))
        jobs = {
            "direct": lambda: seconds_of(lambda: _read(corpus, setup.seed, steps)),
            "prefetched": lambda: seconds_of(lambda: deque(prefetch(_loader(corpus, setup.seed), 0, steps), 0)),
            "wait": lambda: _waiting(corpus, setup.seed, min(steps, 50)),
        }
        taken = alternate(setup.rounds, jobs)
    tokens = steps * BATCH_ROWS * (CONTEXT + 1)
    return Outcome(
        [
            Measure("as asked for", "tokens/s", rates(tokens, taken["direct"])),
            Measure("prefetched", "tokens/s", rates(tokens, taken["prefetched"])),
            Measure("prefetched / as asked for", "×", ratios(taken["direct"], taken["prefetched"])),
            Measure("wait beside steps of 20 ms", "ms a batch", scaled(1e3, taken["wait"])),
        ],
        {"batch_rows": BATCH_ROWS, "context": CONTEXT, "steps": steps, "corpus_tokens": corpus.num_tokens},
    )


def _web_like(setup: Setup, tokens: int) -> list[np.ndarray]:
    """Returns documents of random ids after a BOS; lengths are log-normal (σ = 1) with a mean of 500, at least 2."""
    numbers = np.random.Generator(np.random.Philox(setup.seed))
    mean = np.log(MEAN_DOCUMENT_TOKENS) - 0.5
    lengths = np.maximum(2, numbers.lognormal(mean, 1.0, max(1, tokens // MEAN_DOCUMENT_TOKENS))).astype(np.int64)
    ids = numbers.integers(1, 8192, int(lengths.sum()), dtype=np.int64)
    ends = np.cumsum(lengths)
    ids[ends - lengths] = 0
    return np.split(ids, ends[:-1])


def _own(setup: Setup, tokens: int) -> list[np.ndarray]:
    """Returns the documents of the text, repeated up to that many tokens; id 0 is BOS."""
    made = setup.material.tokenizer
    documents = [np.array([0, *made.encode(text)], dtype=np.int64) for text in setup.material.texts]
    mean = sum(len(ids) for ids in documents) / len(documents)
    return list(itertools.islice(itertools.cycle(documents), max(1, int(tokens / mean))))


@contextmanager
def shards(documents: list[np.ndarray]) -> Iterator[Corpus]:
    """Stores the documents as shards in a temporary folder, for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="quern-bench-") as folder:
        with ShardWriter(Path(folder), "train", vocab_size=8192, bos=0, fingerprint="bench") as writer:
            for ids in documents:
                writer.add(ids)
        yield Corpus.open(Path(folder), "train", fingerprint="bench")


def _loader(corpus: Corpus, seed: int) -> Loader:
    return Loader(corpus, CONTEXT, BATCH_ROWS, seed)


def _epoch_steps(corpus: Corpus, seed: int) -> int:
    """Returns the number of whole batches in the first epoch."""
    return max(1, _loader(corpus, seed).steps_per_epoch - 1)


def _read(corpus: Corpus, seed: int, steps: int) -> None:
    """Reads batches with a new loader, so that packing is included."""
    loader = _loader(corpus, seed)
    for step in range(steps):
        loader.batch(step)


def _waiting(corpus: Corpus, seed: int, steps: int) -> float:
    """Returns the mean seconds that a consumer waits for a batch, after the first one."""
    waited, batches = 0.0, prefetch(_loader(corpus, seed), 0, steps + 1)
    next(batches)
    for _ in range(steps):
        time.sleep(STEP_SECONDS)
        waited += seconds_of(lambda: next(batches))
    return waited / steps
