"""Encodes a stream of documents on several processes, in the order of the stream.

The stream is read in this process and cut into units of about a million characters, wherever the workers are. Each
worker takes the next unit when it is free. Units wait until those before them were yielded, so the result is the same
for any number of workers, and at most `AHEAD` units for each worker are in memory.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain, islice
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from quern.child import Child, start
from quern.temporaries import scratch_folder
from quern.text.encode.worker import encode_documents, receive, send
from quern.text.tokenizer import Tokenizer, well_formed

UNIT_CHARACTERS = 1 << 20
AHEAD = 2
FEW_UNITS = 8
"""A shorter stream is encoded here: a worker takes about half a second to start."""
ENOUGH_WORKERS = 16
"""So many workers by default at most: this process reads and writes some 200 MB/s, which a dozen workers encode."""


class Encoded(NamedTuple):
    """The documents of one unit.

    Args:
        ids: (T,) of the dtype that was asked for, BOS first in each document.
        lengths: (documents,) int64, ids of each, BOS included.
        text_bytes: Their size in bytes of UTF-8.
    """

    ids: np.ndarray
    lengths: np.ndarray
    text_bytes: int


Submit = Callable[[list[str]], Future[Encoded]]
"""Hands a unit to a worker."""
StartWorkers = Callable[[Tokenizer, np.dtype, int], AbstractContextManager[Submit]]
"""Starts so many workers for the length of a block."""


def encode_unit(tokenizer: Tokenizer, unit: list[str], dtype: np.dtype) -> Encoded:
    """Encodes the documents of one unit on this thread."""
    size = sum(len(well_formed(text).encode("utf-8")) for text in unit)
    return Encoded(*encode_documents(tokenizer, unit, dtype), size)


@contextmanager
def on_processes(tokenizer: Tokenizer, dtype: np.dtype, workers: int) -> Iterator[Submit]:
    """`StartWorkers` on this machine: a unit goes to the next process that is free."""
    free: SimpleQueue[tuple[Child, socket.socket]] = SimpleQueue()

    def ask(unit: list[str]) -> Encoded:
        documents = [well_formed(text).encode("utf-8") for text in unit]
        payload, lengths = b"".join(documents), np.array([len(document) for document in documents], dtype=np.int64)
        child, connection = worker = free.get()
        try:
            answer = None
            with suppress(OSError):  # a dead worker; its last lines say why
                send(connection, lengths, payload)
                answer = receive(connection)
            if answer is None:
                child.answer()
                raise RuntimeError("the process that encodes text ended early")
        finally:
            free.put(worker)
        return Encoded(np.frombuffer(answer[1], dtype=dtype), answer[0], len(payload))

    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        order = {"tokenizer": str(tokenizer.save(folder / "tokenizer.json")), "dtype": dtype.str}
        for _ in range(workers):
            here, there = socket.socketpair()
            with there:
                given = {**order, "socket": there.fileno()}
                child = start("quern.text.encode.worker", "encoding", given, pass_fds=(there.fileno(),))
                free.put((stack.enter_context(child), here))
            stack.callback(here.close)  # runs before the child is waited for, and ends it
        threads = ThreadPoolExecutor(workers, "encode")
        stack.callback(threads.shutdown, cancel_futures=True)
        yield lambda unit: threads.submit(ask, unit)


def encoded(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    workers: int = 1,
    unit_characters: int = UNIT_CHARACTERS,
    start_workers: StartWorkers = on_processes,
) -> Generator[Encoded, None, None]:
    """Encodes documents in order.

    Args:
        texts: The documents.
        tokenizer: Encodes them.
        dtype: uint16 or uint32.
        workers: Processes that encode; with 1, this process does.
        unit_characters: A unit ends with the document that gives it this many characters.
        start_workers: Where they run.

    Yields:
        The documents of one unit.

    Raises:
        RuntimeError: A worker has died.
    """
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
