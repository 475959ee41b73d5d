"""The thread that owns the engine, and its queue of requests. HTTP is in server.py.

The event loop never waits for the engine: a job's events are sent from the thread to the loop of the coroutine that
reads them. A cancelled job stops at its next token.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from quern.generate.engine import Event


class Busy(Exception):
    """Too many requests are waiting."""


class Stopped(Exception):
    """The worker has stopped or is about to."""


class Job:
    """One request. `run` makes the events in the worker's thread; iterate over the job to receive them."""

    def __init__(self, run: Callable[[], Iterator[Event]]):
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def work(self, stopping: threading.Event) -> None:
        """Runs the job until it ends or is cancelled; never raises."""
        try:
            if self._cancelled.is_set():
                return self._send(None)
            events = self._run()
            for event in events:
                if self._cancelled.is_set() or stopping.is_set():
                    break
                self._send(event)
            self._send(Stopped("the server is stopping") if stopping.is_set() else None)
        except Exception as error:  # the reader reports the error; the thread continues
            self._send(error)

    def refuse(self, error: Exception) -> None:
        self._send(error)

    def _send(self, item: Event | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, item)
        except RuntimeError:  # the loop is closed: there is no reader
            self._cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (item := await self._events.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class Worker:
    """Runs jobs in order. At most `max_waiting` jobs wait; `submit` raises Busy for more."""

    def __init__(self, max_waiting: int = 64):
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._max_waiting = max_waiting
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="quern-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping.is_set()

    def submit(self, run: Callable[[], Iterator[Event]]) -> Job:
        """Queues a job. Must be called in the event loop that reads the job."""
        if not self.alive:
            raise Stopped("the engine is not running")
        if self._jobs.qsize() >= self._max_waiting:
            raise Busy(f"{self._max_waiting} requests are waiting already")
        job = Job(run)
        self._jobs.put(job)
        return job

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Ends the running job at its next token, refuses waiting jobs, and joins the thread."""
        self._stopping.set()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._stopping.is_set():
                job.refuse(Stopped("the server is stopping"))
            else:
                job.work(self._stopping)
