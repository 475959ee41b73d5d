"""Benchmarks of the steps before the model: tokenizer training, encoding, preparation, packing, loading. No tensors."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children

import numpy as np

from quern.bench.material import write_empty_shards
from quern.bench.measure import Figure, Setup, alternate, figure, peak_bytes, seconds_of
from quern.data.batch import prefetch
from quern.data.loader import Loader
from quern.data.packing import METHODS, pack
from quern.data.shards import Corpus
from quern.data.token_file import ShardWriter
from quern.process import resident, start
from quern.stages.encode import UNIT_CHARACTERS, write_shards
from quern.temporaries import scratch_folder
from quern.terminal import counted, silent
from quern.text.documents import read
from quern.text.sources import files
from quern.text.tokenizer import Tokenizer

CONTEXT, BATCH_ROWS = 512, 32
BATCH_TOKENS = BATCH_ROWS * (CONTEXT + 1)
MEAN_DOCUMENT_TOKENS = 500
PREPARED_BYTES = 250e6
STEP_SECONDS = 0.02  # how long the consumer of `loading` is busy with a batch: about a step on an accelerator
MANY_CONTEXT, MANY_MEAN_TOKENS = 2048, 1000
"""Tokens of the context and of a mean document in the benchmark of many documents."""
SHARES = {"utilisation": "utilisation", "padding": "padding_share", "cropped": "cropped_share"}
"""Names in the record of fields of a packing report."""


def tokenizer(setup: Setup) -> Iterator[Figure]:
    seconds = setup.once({"train": lambda: Tokenizer.train(setup.texts, setup.vocab_size)})["train"]
    setup.settings.update(text=setup.text_name, bytes=setup.text_bytes, documents=len(setup.texts))
    setup.settings["vocabulary"] = setup.tokenizer.vocab_size
    yield figure("tokenizer training", "MB/s", setup.text_bytes / 1e6 / seconds)
    yield figure("time", "s", seconds)


def encode(setup: Setup) -> Iterator[Figure]:
    texts, made = setup.texts, setup.tokenizer
    tokens, megabytes = sum(len(made.encode(text)) for text in texts), setup.text_bytes / 1e6
    jobs = {"list": lambda: list(map(made.encode, texts)), "array": lambda: deque(map(made.encode_array, texts), 0)}
    taken = setup.once(jobs)
    setup.settings.update(text=setup.text_name, bytes=setup.text_bytes, tokens=tokens)
    setup.settings.update(bytes_per_token=round(setup.text_bytes / tokens, 3), vocabulary=made.vocab_size)
    yield figure("one thread", "MB/s", megabytes / taken["list"])
    yield figure("one thread", "tokens/s", tokens / taken["list"])
    yield figure("one thread, arrays", "MB/s", megabytes / taken["array"])


def prepare(setup: Setup) -> Iterator[Figure]:
    """Text to shards, the text several times over: reading, encoding, and writing; one worker is this process."""
    tokenizer, data = setup.tokenizer, setup.data
    passes = max(1, round((3e6 if setup.quick else PREPARED_BYTES) / setup.text_bytes))
    megabytes = passes * setup.text_bytes / 1e6
    children: dict[int, int] = {}
    processor: dict[int, list[float]] = {1: [], 2: []}

    def documents(workers: int) -> Iterator[str]:
        for _ in range(passes):
            yield from (setup.texts if data is None else itertools.islice(read(files(data)), len(setup.texts)))
        children[workers] = sum(resident("VmHWM", str(worker.pid)) or 0 for worker in active_children())

    def write(workers: int) -> None:
        before = sum(os.times()[:4])  # CPU seconds of this process and of its children that have ended
        with scratch_folder() as folder:
            unit = UNIT_CHARACTERS // (8 if setup.quick else 1)  # workers start for eight units
            how = {"workers": workers, "megabytes": megabytes, "unit_characters": unit}
            write_shards(documents(workers), tokenizer, folder, "train", "bench", silent, **how)
        processor[workers].append(sum(os.times()[:4]) - before)

    jobs = {workers: partial(write, workers) for workers in processor}
    taken = setup.once({**{f"{workers}": job for workers, job in jobs.items()}, "read": lambda: deque(documents(1), 0)})
    spent = {workers: np.array(seconds[-setup.rounds :]) for workers, seconds in processor.items()}
    setup.settings.update(text=setup.text_name, megabytes=round(megabytes, 1), vocabulary=tokenizer.vocab_size)
    yield figure("1 worker", "MB/s", megabytes / taken["1"])
    yield figure("2 workers", "MB/s", megabytes / taken["2"])
    yield figure("2 workers / 1", "×", taken["1"] / taken["2"])
    yield figure("1 worker", "MB/s of processor time", megabytes / spent[1])
    yield figure("2 workers", "MB/s of processor time", megabytes / spent[2])
    yield figure("reading alone", "MB/s", megabytes / taken["read"])
    for workers, job in jobs.items():
        grown = peak_bytes(job, setup.machine)
        if grown is not None:
            note = "beyond what the process held before, and all of its workers'"
            yield figure(f"memory, {counted(workers, 'worker')}", "MB", (grown + children[workers]) / 1e6, note)


def packing(setup: Setup) -> Iterator[Figure]:
    """Packing alone by each method, and packing with loading, of documents as long as web pages and of the text's."""
    wanted = 200_000 if setup.quick else 20_000_000
    setup.settings.update(row_tokens=CONTEXT + 1, batch_rows=BATCH_ROWS)
    own = [np.array([0, *setup.tokenizer.encode(text)], dtype=np.int64) for text in setup.texts]  # 0 is BOS
    repeated = max(1, int(wanted * len(own) / sum(map(len, own))))
    for name, documents in (
        ("500-token documents", _web_like(setup.seed, wanted)),
        (setup.text_name, list(itertools.islice(itertools.cycle(own), repeated))),
    ):
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        reports = {method: pack(lengths, CONTEXT + 1, method).report() for method in METHODS}
        shares = {m: {short: round(report[key], 5) for short, key in SHARES.items()} for m, report in reports.items()}
        tokens = int(lengths.sum())
        setup.settings[name] = {"documents": len(lengths), "tokens": tokens, **shares}
        with shards(documents) as corpus:
            steps = _epoch_steps(corpus, setup.seed)
            jobs = {method: partial(pack, lengths, CONTEXT + 1, method) for method in METHODS}
            taken = setup.once({**jobs, "load": partial(_read, corpus, setup.seed, steps)})
        for method in METHODS:
            note = ", ".join(f"{key} {share:.4f}" for key, share in shares[method].items())
            yield figure(f"{name}: pack, {method}", "tokens/s", tokens / taken[method], note)
        yield figure(f"{name}: pack and load, best-fit", "tokens/s", steps * BATCH_TOKENS / taken["load"])
    yield from _many_documents(setup, 20_000 if setup.quick else setup.documents)


def _many_documents(setup: Setup, documents: int) -> Iterator[Figure]:
    """A loader of many documents, in a new process without torch for each figure, so that its memory can be read."""
    with scratch_folder() as folder:
        write_empty_shards(folder, documents, MANY_MEAN_TOKENS, setup.seed)
        middle = documents * MANY_MEAN_TOKENS // 2 // ((MANY_CONTEXT + 1) * BATCH_ROWS)
        order = {"folder": str(folder), "context": MANY_CONTEXT, "batch_rows": BATCH_ROWS, "seed": setup.seed}

        def ask(step: int) -> dict[str, float]:
            with start("quern.bench.material", "loader", order) as process:
                return process.ask(step)

        starts, resumes = ([ask(step) for _ in range(setup.rounds)] for step in (0, middle))
    name = f"{documents:,} documents"
    setup.settings[name] = {"tokens": documents * MANY_MEAN_TOKENS, "context": MANY_CONTEXT, "middle_step": middle}
    yield figure(f"{name}: start", "s", [one["seconds"] for one in starts])
    yield figure(f"{name}: resume in mid-epoch", "s", [one["seconds"] for one in resumes], "packs half an epoch")
    if "peak_bytes" in resumes[0]:
        note = f"{max(one['own_bytes'] for one in resumes) / 1e6:,.0f} MB of it not shared"
        yield figure(f"{name}: peak memory", "MB", [one["peak_bytes"] / 1e6 for one in resumes], note)


def loading(setup: Setup) -> Iterator[Figure]:
    """Batches made on request and batches made ahead, and how long a step waits for one made ahead."""
    wanted, steps = (200_000, 8) if setup.quick else (20_000_000, 400)
    with shards(_web_like(setup.seed, wanted)) as corpus:
        steps = min(steps, _epoch_steps(corpus, setup.seed))
        jobs = {
            "direct": partial(seconds_of, partial(_read, corpus, setup.seed, steps)),
            "prefetched": partial(seconds_of, lambda: deque(prefetch(_loader(corpus, setup.seed), 0, steps), 0)),
            "wait": partial(_waiting, corpus, setup.seed, min(steps, 50)),
        }
        taken = alternate(setup.rounds, jobs)
    setup.settings.update(batch_rows=BATCH_ROWS, context=CONTEXT, steps=steps, corpus_tokens=corpus.num_tokens)
    yield figure("as asked for", "tokens/s", steps * BATCH_TOKENS / taken["direct"])
    yield figure("prefetched", "tokens/s", steps * BATCH_TOKENS / taken["prefetched"])
    yield figure("prefetched / as asked for", "×", taken["direct"] / taken["prefetched"])
    yield figure("wait beside steps of 20 ms", "ms a batch", 1e3 * taken["wait"])


def _web_like(seed: int, tokens: int) -> list[np.ndarray]:
    """Returns documents of random ids after a BOS; lengths are log-normal (σ = 1) with a mean of 500, at least 2."""
    numbers = np.random.Generator(np.random.Philox(seed))
    mean = np.log(MEAN_DOCUMENT_TOKENS) - 0.5
    lengths = np.maximum(2, numbers.lognormal(mean, 1.0, max(1, tokens // MEAN_DOCUMENT_TOKENS))).astype(np.int64)
    ids = numbers.integers(1, 8192, int(lengths.sum()), dtype=np.int64)
    ends = np.cumsum(lengths)
    ids[ends - lengths] = 0
    return np.split(ids, ends[:-1])


@contextmanager
def shards(documents: list[np.ndarray]) -> Iterator[Corpus]:
    """Stores the documents as shards in a temporary folder, for the length of the block."""
    with scratch_folder() as folder:
        with ShardWriter(folder, "train", vocab_size=8192, bos=0, fingerprint="bench") as writer:
            for ids in documents:
                writer.add(ids)
        yield Corpus.open(folder, "train", fingerprint="bench")


def _loader(corpus: Corpus, seed: int) -> Loader:
    return Loader(corpus, CONTEXT, BATCH_ROWS, seed)


def _epoch_steps(corpus: Corpus, seed: int) -> int:
    """Returns the batches of the first epoch before the last one, which may not be whole; at least 1."""
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
