"""An engine, and the requests it works on. engine_thread.py runs it; HTTP is in server.py.

All open requests share the engine's running batch: a request joins it at any token and leaves it at its last one. The
event loop never waits for the engine: after a step, what the requests produced is sent to the loops of the coroutines
that read them, in one call. A reader gets the pieces of several steps at once, twenty-five times a second.
"""

import asyncio
import queue
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quern.generate.engine import Engine
from quern.generate.rows import Event, Generation
from quern.generate.scheduler import INTERLEAVED_TOKENS
from quern.serve.metrics import ModelMetrics
from quern.serve.requests.errors import ApiError

STREAM_SECONDS = 0.04
"""The time between two pieces of a stream. The first piece and the end are sent at once. One piece for each token costs
32 clients a quarter of the throughput (docs/serving.md)."""

Between = Callable[[Callable[[], Any]], Awaitable[Any]]


def stopped(why: str) -> ApiError:
    return ApiError(f"The server is unavailable: {why}.", status=503, kind="server_error")


@dataclass(frozen=True)
class Limits:
    """Of one engine's requests."""

    waiting: int = 256
    """Rows that may wait for a seat; further requests are refused."""
    seconds: float = 600.0
    """The longest time from a request's arrival to its last token."""


class Job:
    """One request. `submit` starts it in the engine thread; iterate over `batches` to receive its events.

    between: runs a function between two steps of the engine (`Worker.call`).
    """

    def __init__(self, submit: Callable[[], Generation], seconds: float, rows: int, between: Between) -> None:
        self._submit, self.rows, self.between = submit, rows, between
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._expire, seconds)
        self._items: list[list[Event] | BaseException | None] = []
        self._reader: asyncio.Future[None] | None = None
        self._cancelled = False
        self.generation: Generation | None = None
        self.arrived = self.latest = time.perf_counter()
        self.started = False

    def cancel(self) -> None:
        """The request leaves the batch at its next token. Harmless after its end. In the event loop or the worker."""
        self._cancelled = True
        if self.generation is not None:
            self.generation.cancel()

    def _expire(self, seconds: float) -> None:
        self.cancel()
        message = f"The reply took longer than {seconds:g} s: ask for fewer tokens, or try again later."
        self.put(ApiError(message, status=504, kind="server_error", code="timeout"))

    def put(self, item: list[Event] | BaseException | None) -> None:
        """Hands an item to the reader, in the event loop: events, what ended the request early, or None for its end."""
        if not isinstance(item, list):
            self._timer.cancel()
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def begin(self) -> bool:
        """Submits the request, in the engine thread. Returns False if nobody waits for it any more."""
        if not self._cancelled:
            self.generation = self._submit()
        return not self._cancelled

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yields what became final since the previous call, until the end. Raises what ended the request early."""
        ended = False
        while not ended:
            if not self._items:
                self._reader = self._loop.create_future()
                await self._reader
            items, self._items = self._items, []
            events: list[Event] = []
            for item in items:
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    ended = True
                else:
                    events += item
            if events:
                yield events


class Call:
    """A function that runs in the engine thread, between two steps. Make it in the event loop that awaits `done`."""

    rows = 0

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._loop = function, asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._loop.create_future()

    def run(self) -> None:
        try:
            self.settle(self._function(), None)
        except Exception as error:
            self.settle(None, error)

    def settle(self, result: Any, error: Exception | None) -> None:
        """Sends a result or an error to the event loop."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(_settle, self.done, result, error)


class Worker:
    """Runs requests together.

    Args:
        engine: Used by the engine thread alone once the worker belongs to it.
        metrics: Counts what happens.
        limits: How many rows may wait, and how long a request may take.
    """

    def __init__(self, engine: Engine, metrics: ModelMetrics, limits: Limits) -> None:
        self.engine, self.metrics = engine, metrics
        self._limits = limits
        self._inbox: queue.SimpleQueue[Job | Call] = queue.SimpleQueue()
        self._calls: deque[Call] = deque()
        self._open: list[Job] = []
        # Jobs, the first counted in the event loop alone, the second in the engine thread alone.
        self._submitted = self._ended = 0
        self._queued = self._taken = 0  # rows of jobs, counted likewise
        self._wake: Callable[[], None] | None = None
        self._stopped = False
        self._told = 0.0  # when all streams last got their pieces

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Sets what wakes the thread that calls `turn`. Until then, requests are refused."""
        self._wake = wake

    @property
    def alive(self) -> bool:
        return self._wake is not None and not self._stopped

    @property
    def waiting(self) -> int:
        """Rows that have no seat yet."""
        return self._queued - self._taken + len(self.engine.scheduler.waiting)

    @property
    def open(self) -> bool:
        """Whether a request is waiting or being answered."""
        return self._submitted > self._ended

    def submit(self, submit: Callable[[], Generation], rows: int = 1) -> Job:
        """Queues a request. Must be called in the event loop that reads the job.

        Args:
            submit: Starts the request, in the engine thread.
            rows: The replies that it asks for.

        Raises:
            ApiError: Too many rows are waiting (429) or more than can wait (400), or the worker has stopped (503).
        """
        if not self.alive:
            raise stopped("the engine is not running")
        most = self.engine.scheduler.max_rows + self._limits.waiting
        if rows > most:
            message = f"The request asks for {rows} replies, prompts times 'n'; this server takes up to {most} at once."
            raise ApiError(message, param="n", code="invalid_value")
        if self.waiting and self.waiting + rows > self._limits.waiting:
            message = f"The server is busy: {self.waiting} replies are waiting already. Try again later."
            raise ApiError(message, status=429, kind="rate_limit_error")
        job = Job(submit, self._limits.seconds, rows, self.call)
        self._submitted += 1
        self._queued += rows
        self._put(job)
        return job

    async def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function in the engine thread, between two steps; returns its result.

        What computes for milliseconds in Python belongs here. In another thread it takes longer itself, and each of the
        hundreds of operations of a step then waits for the interpreter.
        """
        if not self.alive:
            raise stopped("the engine is not running")
        call = Call(function)
        self._put(call)
        try:
            return await call.done
        finally:
            del call  # an error would hold this frame, the call, and in it itself: what it was about stays in memory

    def _put(self, item: Job | Call) -> None:
        self._inbox.put(item)
        assert self._wake is not None
        self._wake()

    def turn(self) -> bool:
        """Starts the requests that have arrived, runs one call, and takes one step of the engine.

        Returns:
            Whether there is more to do at once.
        """
        if not self._open and not self._calls and self._inbox.empty():
            return False
        self._take_new()
        if self._calls:
            self._calls.popleft().run()
        if self._open:
            try:
                self.engine.step(INTERLEAVED_TOKENS)
            except Exception as error:  # the readers report the error; the worker goes on
                self._end([(job, error) for job in self._open])
                self._open = []
            else:
                self._deliver()
        if not self._open:  # the rows of clients that have left would keep their seats until the next request
            self.engine.scheduler.reset()
        self.metrics.set_load(self.engine.scheduler.running, self.waiting)
        return bool(self._open or self._calls)

    def stop(self) -> None:
        """Ends all requests with an error, also those that come later. In the engine thread, or after its end."""
        self._stopped = True
        error, jobs = stopped("the server is stopping"), list(self._open)
        for item in (*self._calls, *self._arrived()):
            if isinstance(item, Job):
                jobs.append(item)
            else:
                item.settle(None, error)
        self._end([(job, error) for job in jobs])

    def _take_new(self) -> None:
        """Starts the requests that have arrived."""
        for item in self._arrived():
            if isinstance(item, Call):
                self._calls.append(item)
                continue
            try:
                if item.begin():
                    self._open.append(item)
                else:
                    self._end([(item, None)])
            except Exception as error:
                self._end([(item, error)])

    def _arrived(self) -> Iterator[Job | Call]:
        """Empties the inbox."""
        while not self._inbox.empty():
            item = self._inbox.get()
            self._taken += item.rows
            yield item

    def _end(self, items: list[tuple[Job, Any]]) -> None:
        """Sends jobs their last item."""
        self._ended += len(items)
        _send(items)

    def _deliver(self) -> None:
        """Sends the events of the last steps to their readers."""
        items: list[tuple[Job, Any]] = []
        still_open = []
        now = time.perf_counter()
        if due := now - self._told >= STREAM_SECONDS:
            self._told = now
        for job in self._open:
            generation = job.generation
            assert generation is not None
            cancelled = job.cancelled  # which may change at any moment: a request counts as finished or as aborted
            if generation.events and (due or not job.started or not generation.unfinished) and not cancelled:
                events = list(generation.events)
                generation.events.clear()
                items.append((job, events))
                self.metrics.observe(events, now - job.latest, not job.started)
                job.started, job.latest = True, now
            if generation.unfinished and not cancelled:
                still_open.append(job)
            else:
                items.append((job, None))
                self._ended += 1
                self.metrics.finish(now - job.arrived, cancelled)
        self._open = still_open
        _send(items)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _send(items: list[tuple[Job, Any]]) -> None:
    """Hands items to their readers, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, Any]]] = defaultdict(list)
    for job, item in items:
        by_loop[job._loop].append((job, item))
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, own)
        except RuntimeError:  # the loop is closed: there is no reader
            for job, _ in own:
                job.cancel()


def _put(items: list[tuple[Job, Any]]) -> None:
    for job, item in items:
        job.put(item)
