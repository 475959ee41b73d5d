"""The one thread that runs the engines of all models of a server, in turn.

One, and in `quern serve` the program's first, in which the models were loaded: OpenMP keeps threads for every thread
that has computed. Once all of them are more than there are cores, they wait for each other by system calls, and a step
takes two to three times as long.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quern.serve.worker import Worker

STOP_SECONDS = 10.0
IDLE_SECONDS = 0.5
"""Python runs the handler of a signal that came just before a wait only after that wait."""
Result = TypeVar("Result")


class EngineThread:
    """Runs workers from `start`, or in the thread that calls `run`, until `stop`."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._wake = threading.Event()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self.elsewhere = False
        """A caller will use `run`: then `start` does nothing."""

    def add(self, worker: Worker) -> None:
        worker.wake_with(self._wake.set)
        self._workers.append(worker)

    def remove(self, worker: Worker) -> None:
        """Stops a worker; what it has not answered ends with an error."""
        self._workers.remove(worker)
        worker.stop()

    def start(self) -> None:
        """Runs the workers in a new thread."""
        if not self.elsewhere:
            threading.Thread(target=self.run, name="quern-engines", daemon=True).start()

    def run(self) -> None:
        """Runs the workers until the end of `stop`."""
        try:
            while not self._stopping.is_set():
                self._wake.clear()  # before looking: what comes later sets it again
                busy = [worker.turn() for worker in tuple(self._workers)]
                if not any(busy):
                    self._wake.wait(IDLE_SECONDS)
        finally:
            for worker in self._workers:
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


async def in_new_thread(function: Callable[[], Result]) -> Result:
    """As asyncio.to_thread, for what computes: the thread ends with the call, and OpenMP's own with it."""
    with ThreadPoolExecutor(1) as threads:
        return await asyncio.get_running_loop().run_in_executor(threads, function)
