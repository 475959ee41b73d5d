"""The models of a server, by name, and the one thread that runs them. A model can be replaced while the server runs."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Mapping
from functools import partial

from quern.generate.engine import Engine
from quern.serve.errors import ApiError
from quern.serve.worker import Limits, Metrics, Worker

STOP_SECONDS = 10.0
IDLE_SECONDS = 0.5
"""Python runs the handler of a signal that came just before a wait only after that wait."""


class Models:
    """Every model of a server, by the names that requests use; each is the worker of an engine.

    Their workers run in turn, from `start`, or in the thread that calls `run`, until `stop`. There is one thread, and
    in `quern serve` it is the program's first, in which the models were loaded: OpenMP keeps threads for every thread
    that has computed. Once all of them are more than there are cores, they wait for each other by system calls, and a
    step takes two to three times as long.
    """

    def __init__(self, engines: Mapping[str, Engine], limits: Limits) -> None:
        self.metrics, self._limits = Metrics(), limits
        self._wake, self._stopping, self._ended = threading.Event(), threading.Event(), threading.Event()
        self.elsewhere = False
        """A caller will use `run`: then `start` does nothing."""
        self._running: list[Worker] = []
        self._models = {name: self._add(name, engine) for name, engine in engines.items()}

    def _add(self, name: str, engine: Engine) -> Worker:
        self._running.append(Worker(name, engine, self.metrics, self._limits, self._wake.set))
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

    def start(self) -> None:
        """Runs the workers in a new thread."""
        if not self.elsewhere:
            threading.Thread(target=self.run, name="quern-engines", daemon=True).start()

    def run(self) -> None:
        """Runs the workers until the end of `stop`."""
        try:
            while not self._stopping.is_set():
                self._wake.clear()  # before looking: what comes later sets it again
                busy = [worker.turn() for worker in tuple(self._running)]
                if not any(busy):
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
