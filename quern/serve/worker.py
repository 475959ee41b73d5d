"""The models of a server, the requests they work on, and the one thread that runs them.

All open requests share the engine's running batch: a request joins it at any token and leaves it at its last one. The
event loop never waits for the engine: after a step, what the requests produced is sent to the coroutines that read
them, in one call. A reader gets the pieces of several steps at once, twenty-five times a second.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from quern.generate.engine import SERVED_TOKENS, Engine
from quern.generate.reply import Event, Generation
from quern.serve.metrics import Metrics
from quern.serve.schema import ApiError, failure

STOP_SECONDS = 10.0
WAITING_ROWS = 256  # of one engine; further requests are refused
REQUEST_SECONDS = 600.0  # from a request's arrival to its last token
IDLE_SECONDS = 0.5
"""Python runs the handler of a signal that came just before a wait only after that wait."""


STREAM_SECONDS = 0.04
"""The time between two pieces of a stream. The first piece and the end are sent at once. One piece for each token costs
32 clients a quarter of the throughput (docs/serving.md)."""


class Job:
    """One request for some rows. Iterate over `batches` to receive its events. submit: starts it in the engine."""

    def __init__(self, submit: Callable[[], Generation], rows: int, worker: Worker, seconds: float) -> None:
        self._submit, self.rows, self.worker = submit, rows, worker
        self.loop = asyncio.get_running_loop()
        self._timer = self.loop.call_later(seconds, self._expire, seconds)
        self._items: asyncio.Queue[list[Event] | BaseException | None] = asyncio.Queue()
        self._ended = self.cancelled = self.started = False
        self.generation: Generation | None = None
        self.arrived = self.latest = time.perf_counter()

    def cancel(self) -> None:
        """The request leaves the batch at its next token. Harmless after its end. In the event loop or the worker."""
        self.cancelled = True
        if self.generation is not None:
            self.generation.cancelled = True

    def _expire(self, seconds: float) -> None:
        self.cancel()
        message = f"The reply took longer than {seconds:g} s: ask for fewer tokens, or try again later."
        self.put(ApiError(message, status=504, kind="server_error", code="timeout"))

    def put(self, item: list[Event] | BaseException | None) -> None:
        """Hands an item to the reader, in the event loop: events, what ended the request early, or None for its end."""
        if self._ended:
            return
        if not isinstance(item, list):
            self._ended = True
            self._timer.cancel()
            self.worker.open -= 1
        self._items.put_nowait(item)

    def begin(self) -> bool:
        """Submits the request, in the engine thread. Returns False if nobody waits for it any more."""
        if not self.cancelled:
            self.generation = self._submit()
        if self.cancelled:  # perhaps meanwhile, when there was no generation to cancel
            self.cancel()
        return not self.cancelled

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yields what became final since the previous call, until the end. Raises what ended the request early."""
        item: list[Event] | BaseException | None = []
        while item is not None:
            item, events = await self._items.get(), list[Event]()
            while isinstance(item, list):
                events += item
                if self._items.empty():
                    break
                item = self._items.get_nowait()
            if isinstance(item, BaseException):
                raise item
            if events:
                yield events


class Worker:
    """A model: runs its requests together. Only the engine thread, which `wake` wakes to call `turn`, uses the engine.

    A request holds the model (`with worker:`) until its jobs are submitted.
    """

    def __init__(self, name: str, engine: Engine, metrics: Metrics, seconds: float, wake: Callable[[], None]) -> None:
        self.name, self.engine, self.tokenizer = name, engine, engine.tokenizer
        self._metrics, self._seconds, self._wake = metrics, seconds, wake
        metrics.watch(name, engine, lambda: self.waiting)
        self.created = int(time.time())
        self.alive = True
        self.held = 0
        """Requests that have found this model and may still submit jobs to it."""
        self.open = 0
        """Requests that are waiting or being answered, counted in the event loop."""
        self.slow = ThreadPoolExecutor(1, "quern-slow")
        """Reads requests that may take seconds: to compile the form of a reply, or to encode a long text."""
        self._arrived: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._jobs: list[Job] = []  # in the engine
        self._told = 0.0  # when all streams last got their pieces

    def __enter__(self) -> Worker:
        self.held += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.held -= 1

    def body(self) -> dict[str, Any]:
        """The model as `/v1/models` shows it."""
        head = {"id": self.name, "object": "model", "created": self.created, "owned_by": "quern"}
        return {**head, "max_model_len": self.engine.context}

    @property
    def waiting(self) -> int:
        """Rows that have no seat yet."""
        return sum(job.rows for job in tuple(self._arrived)) + len(self.engine.waiting)

    def _require_life(self) -> None:
        if not self.alive:
            raise _stopped("the engine is not running")

    def submit(self, submit: Callable[[], Generation], rows: int = 1) -> Job:
        """Queues a request for so many replies, in the event loop that reads the job. submit: starts it in the engine.

        Raises ApiError: too many rows are waiting (429) or more than can wait (400), or the worker has stopped (503).
        """
        self._require_life()
        most = self.engine.max_rows + WAITING_ROWS
        if rows > most:
            message = f"The request asks for {rows} replies, prompts times 'n'; this server takes up to {most} at once."
            raise ApiError(message, param="n", code="invalid_value")
        if (waiting := self.waiting) and waiting + rows > WAITING_ROWS:
            message = f"The server is busy: {waiting} replies are waiting already. Try again later."
            raise ApiError(message, status=429, kind="rate_limit_error")
        job = Job(submit, rows, self, self._seconds)
        self.open += 1
        self._arrived.append(job)
        self._wake()
        return job

    async def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function in the engine thread, between two steps; returns its result.

        What computes for milliseconds in Python belongs here. In another thread it takes longer itself, and each of the
        hundreds of operations of a step then waits for the interpreter.
        """
        self._require_life()
        future: Future[Any] = Future()
        self._calls.append((function, future))
        self._wake()
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # an error would hold this frame, and in it itself: what it was about stays in memory

    def turn(self) -> bool:
        """Starts what has arrived, runs one call, and takes one step of the engine. Returns whether more waits."""
        if not (self._jobs or self._calls or self._arrived):
            return False
        self._take_arrived()
        if self._calls:
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            del function, future  # as in `call`
        if self._jobs:
            try:
                self.engine.step(SERVED_TOKENS)
            except Exception as error:  # the readers report it, without its frames; the worker goes on
                told, now = failure(error), time.perf_counter()
                for job in self._jobs:
                    self._metrics.finish(self.name, now - job.arrived, "error")
                _send([(job, told) for job in self._jobs])
                self._jobs = []
            else:
                self._deliver()
        if not self._jobs:  # the rows of clients that have left would keep their seats until the next request
            self.engine.reset()
        return bool(self._jobs or self._calls)

    def stop(self) -> None:
        """Ends all requests with an error, also those that come later. In the engine thread, or after its end."""
        self.alive, error = False, _stopped("the server is stopping")
        while self._calls:
            _, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        _send([(job, error) for job in (*self._jobs, *self._arrived)])

    def _take_arrived(self) -> None:
        ended: list[tuple[Job, Any]] = []
        while self._arrived:
            job = self._arrived.popleft()
            try:
                if job.begin():
                    self._jobs.append(job)
                else:
                    ended.append((job, None))
            except Exception as error:
                ended.append((job, failure(error)))
        _send(ended)

    def _deliver(self) -> None:
        """Sends the events of the last steps to their readers."""
        items: list[tuple[Job, Any]] = []
        still_open = []
        now = time.perf_counter()
        if due := now - self._told >= STREAM_SECONDS:
            self._told = now
        for job in self._jobs:
            generation = job.generation
            assert generation is not None
            cancelled = job.cancelled  # which may change at any moment: a request counts as finished or as aborted
            if generation.events and (due or not job.started or not generation.unfinished) and not cancelled:
                events = list(generation.events)
                generation.events.clear()
                items.append((job, events))
                self._metrics.observe(self.name, events, now - job.latest, not job.started)
                job.started, job.latest = True, now
            if generation.unfinished and not cancelled:
                still_open.append(job)
            else:
                items.append((job, None))
                self._metrics.finish(self.name, now - job.arrived, "abort" if cancelled else None)
        self._jobs = still_open
        _send(items)


def _stopped(why: str) -> ApiError:
    return ApiError(f"The server is unavailable: {why}.", status=503, kind="server_error")


def _send(items: list[tuple[Job, Any]]) -> None:
    """Hands items to their readers, with one call of their event loop, which is the same for all."""
    if not items:
        return

    def put() -> None:
        for job, item in items:
            job.put(item)

    try:
        items[0][0].loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop is closed: there is no reader
        for job, _ in items:
            job.cancel()


class Models:
    """Every model of a server, by the names that requests use; each is the worker of an engine.

    Their workers run in turn, in the thread that calls `run`, until `stop`. In `quern serve` it is the program's first,
    in which the models were loaded: OpenMP keeps threads for every thread that has computed. Once all of them are more
    than there are cores, they wait for each other by system calls, and a step takes two to three times as long.

    seconds: The longest time from a request's arrival to its last token.
    """

    def __init__(self, engines: Mapping[str, Engine], seconds: float = REQUEST_SECONDS) -> None:
        self.metrics, self._seconds = Metrics(), seconds
        self._wake, self._stopping, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._running: list[Worker] = []
        self._models = {name: self._add(name, engine) for name, engine in engines.items()}

    def _add(self, name: str, engine: Engine) -> Worker:
        self._running.append(Worker(name, engine, self.metrics, self._seconds, self._wake.set))
        return self._running[-1]

    def all(self) -> list[Worker]:
        return list(self._models.values())

    def find(self, name: str | None) -> Worker:
        """The model with a name; with None, the first one. Raises ApiError for an unknown name."""
        model = self._models.get(next(iter(self._models)) if name is None else name)
        if model is None:
            known = "', '".join(self._models)
            message = f"The model '{name}' does not exist; this server has '{known}'."
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return model

    async def replace(self, name: str, engine: Engine) -> None:
        """Sends new requests to another engine; returns when the old one has answered those that had found it."""
        old, new = self._models[name], self._add(name, engine)
        self._models[name] = new
        while old.held or old.open:
            await asyncio.sleep(0.05)
        await new.call(partial(self._running.remove, old))
        old.stop()
        del old
        if gc.get_freeze_count():
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def run(self) -> None:
        """Runs the workers until the end of `stop`."""
        try:
            while not self._stopping.is_set():
                self._wake.clear()  # before looking: what comes later sets it again
                if not any([worker.turn() for worker in tuple(self._running)]):
                    self._wake.wait(IDLE_SECONDS)
        finally:
            for worker in self._running:
                worker.stop()
            self._ended.set()

    def end(self) -> None:
        """Ends all requests at their next token."""
        self._stopping.set()
        self._wake.set()

    def stop(self) -> None:
        """`end`, and waits for it."""
        self.end()
        self._ended.wait(STOP_SECONDS)
