"""Encodes a stream of documents on several processes, in the order of the stream, and writes them as token shards.

Units have about a million characters. A process of this machine takes the next one when it is free; the actors of a Ray
cluster take them in turn. Units wait until those before them were yielded, so the number of workers changes no result.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import chain, cycle, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quern.cluster import actors
from quern.data.token_file import SHARD_TOKENS, ShardWriter
from quern.terminal import Meter, counted
from quern.text.tokenizer import Tokenizer, well_formed

UNIT_CHARACTERS = 1 << 20
AHEAD = 2
FEW_UNITS = 8  # a shorter stream is encoded here: a worker takes about half a second to start
RESTARTS = 10  # how often an encoder of a cluster may be lost
ENOUGH_WORKERS = 16
"""The most workers by default: this process reads and writes some 200 MB/s, which a dozen workers encode."""


class Encoded(NamedTuple):
    """The documents of one unit."""

    ids: np.ndarray  # (T,) of the dtype that was asked for, BOS first in each document
    lengths: np.ndarray  # (documents,) int64, ids of each, BOS included
    text_bytes: int  # size in UTF-8


Submit = Callable[[list[str]], Future[Encoded]]  # hands a unit to a worker
StartWorkers = Callable[[Tokenizer, np.dtype, int], AbstractContextManager[Submit]]
"""Starts so many workers for the length of a block."""


def encode_unit(tokenizer: Tokenizer, unit: list[str], dtype: np.dtype) -> Encoded:
    """Encodes the documents of a unit one by one: tiktoken's threads wait for each other at every short document."""
    documents, bos = [], np.array([tokenizer.bos], dtype=np.uint32)
    for text in unit:
        documents += [bos, tokenizer.encode_array(text)]
    lengths = np.array([len(ids) for ids in documents[1::2]], dtype=np.int64) + 1
    size = sum(len(well_formed(text).encode("utf-8")) for text in unit)
    return Encoded(np.concatenate(documents, dtype=dtype, casting="same_kind"), lengths, size)


@contextmanager
def on_processes(tokenizer: Tokenizer, dtype: np.dtype, workers: int) -> Iterator[Submit]:
    """`StartWorkers` on this machine: a unit goes to the next process that is free."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (tokenizer, dtype))
    try:
        yield lambda unit: pool.submit(_encode, unit)
    except BrokenProcessPool as error:
        raise RuntimeError("an encoding process ended early: if memory is short, give fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: list[tuple[Tokenizer, np.dtype]] = []  # the tokenizer and the dtype of this worker


def _begin(tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """Makes this process a worker, which ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends this process
    _worker.append((tokenizer, dtype))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _encode(unit: list[str]) -> Encoded:
    tokenizer, dtype = _worker[0]
    return encode_unit(tokenizer, unit, dtype)


class _Encoder:
    """The actor of a cluster: encodes one unit after the other on one CPU."""

    def __init__(self, tokenizer: Tokenizer, dtype: str) -> None:
        self._tokenizer, self._dtype = tokenizer, np.dtype(dtype)

    def encode(self, unit: list[str]) -> Encoded:
        return encode_unit(self._tokenizer, unit, self._dtype)


@contextmanager
def on_cluster(tokenizer: Tokenizer, dtype: np.dtype, workers: int) -> Iterator[Submit]:
    """`StartWorkers` on the Ray cluster that `quern.cluster` has connected, each of whose machines has quern installed.

    An encoder whose machine is lost starts on another one, and encodes its units again: equal units, equal ids. Raises
    RuntimeError if the cluster has no room for the encoders, or encoders were lost too often.
    """
    what, needs = f"{workers} encoders of one CPU each", {"max_restarts": RESTARTS, "max_task_retries": RESTARTS}
    with actors(_Encoder, workers, what, (tokenizer, dtype.str), num_cpus=1, **needs) as encoders:
        turns = cycle(encoders)
        yield lambda unit: next(turns).encode.remote(unit).future()


def encoded(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    workers: int = 1,
    unit_characters: int = UNIT_CHARACTERS,
    start_workers: StartWorkers = on_processes,
) -> Generator[Encoded, None, None]:
    """Encodes documents in order, a unit of at least `unit_characters` at a time; with one worker, in this process.
    Raises RuntimeError if a worker has died."""
    units = _units(texts, unit_characters)
    first = list(islice(units, FEW_UNITS))
    if workers == 1 or len(first) < FEW_UNITS:
        for unit in chain(first, units):
            yield encode_unit(tokenizer, unit, dtype)
        return
    with start_workers(tokenizer, dtype, workers) as submit:
        waiting: deque[Future[Encoded]] = deque()
        for unit in chain(first, units):
            waiting.append(submit(unit))
            if len(waiting) == AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _units(texts: Iterable[str], unit_characters: int) -> Iterator[list[str]]:
    unit: list[str] = []
    size = 0
    for text in texts:
        unit.append(text)
        size += len(text)
        if size >= unit_characters:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def write_shards(
    texts: Iterator[str],
    tokenizer: Tokenizer,
    folder: Path,
    split: str,
    fingerprint: str,
    log: Callable[[str], None],
    *,
    workers: int = 1,
    megabytes: float | None = None,
    shard_tokens: int = SHARD_TOKENS,
    unit_characters: int = UNIT_CHARACTERS,
    start_workers: StartWorkers = on_processes,
) -> None:
    """Writes a split, or what an earlier writer of the same split has left to do.

    Takes the arguments of `ShardWriter` and `encoded`; megabytes: the size of the text, for the time left, if known.

    Raises:
        ValueError: There are no documents.
        RuntimeError: A worker has died.
        OSError: The shards cannot be written.
    """
    known = {"vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos}
    with ShardWriter(folder, split, shard_tokens, **known, fingerprint=fingerprint) as writer:
        skipped = _skip(texts, writer.documents, split)
        if writer.documents:
            log(f"tokens: {split} continues after {counted(writer.documents, 'document')}, finished before")
        start, done = time.monotonic(), 0
        with (
            Meter(f"tokenizing {split}", megabytes, "MB") as meter,
            closing(encoded(texts, tokenizer, writer.dtype, workers, unit_characters, start_workers)) as units,
        ):
            for unit in units:
                writer.add_documents(unit.ids, unit.lengths)
                done += unit.text_bytes
                speed = done / 1e6 / (time.monotonic() - start)
                meter.at((skipped + done) / 1e6, f"{speed:.1f} MB/s, {writer.tokens / 1e6:.1f}M tokens")
    speed = done / 1e6 / (time.monotonic() - start)
    log(f"tokens: {split} {writer.tokens:,} from {counted(writer.documents, 'document')}, {speed:.1f} MB/s → {folder}")


def _skip(texts: Iterator[str], documents: int, split: str) -> int:
    """Reads past the first documents, and returns their size in bytes."""
    size = 0
    with Meter(f"reading past finished documents of {split}", documents, "documents") as meter:
        for number, text in enumerate(islice(texts, documents)):
            size += len(text.encode("utf-8", "replace"))
            meter.at(number)
    return size
