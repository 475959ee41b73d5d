"""The one thread that owns the engine. Requests wait in line for it; the event loop never does.

A job's events travel from the thread to the loop of the coroutine that reads them. Cancelling takes effect at
the next token, whether the job is waiting, running or finished. What is not here: HTTP (server.py).
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
    """One request: `run` makes its events, in the worker's thread; iterate over the job to receive them."""

    def __init__(self, run: Callable[[], Iterator[Event]]):
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def work(self, stopping: threading.Event) -> None:
        """Runs the job to its end, or until it is cancelled; never raises."""
        try:
            if self._cancelled.is_set():
                return self._send(None)
            events = self._run()
            for event in events:
                if self._cancelled.is_set() or stopping.is_set():
                    break
                self._send(event)
            self._send(Stopped("the server is stopping") if stopping.is_set() else None)
        except Exception as error:  # whatever went wrong is the reader's to report; the thread lives on
            self._send(error)

    def refuse(self, error: Exception) -> None:
        self._send(error)

    def _send(self, item: Event | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody is left to read
            self._cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (item := await self._events.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class Worker:
    """Runs jobs one after the other. At most `max_waiting` may wait; more raise Busy."""

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
        """Puts a job in line. To be called in the event loop that will read it."""
        if not self.alive:
            raise Stopped("the engine is not running")
        if self._jobs.qsize() >= self._max_waiting:
            raise Busy(f"{self._max_waiting} requests are waiting already")
        job = Job(run)
        self._jobs.put(job)
        return job

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Ends the running job at its next token, refuses those in line, and waits for the thread."""
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
