"""The models of a server, by name. Each has a worker, and can be replaced while the server runs."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from quern.generate.engine import Engine
from quern.serve.errors import ApiError
from quern.serve.worker import EngineThread, Limits, Metrics, Worker


class Model:
    """One engine with its worker. A request holds it (`with model:`) until its jobs are submitted."""

    def __init__(self, name: str, engine: Engine, metrics: Metrics, limits: Limits) -> None:
        self.name, self.engine, self.tokenizer = name, engine, engine.tokenizer
        self.worker = Worker(name, engine, metrics, limits)
        self.created = int(time.time())
        self.held = 0
        """Requests that have found this model and may still submit jobs to it."""

    def __enter__(self) -> Model:
        self.held += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.held -= 1

    def body(self) -> dict[str, Any]:
        """The model as `/v1/models` shows it."""
        head = {"id": self.name, "object": "model", "created": self.created, "owned_by": "quern"}
        return {**head, "max_model_len": self.engine.context}


class Models:
    """Every model of a server, by the names that requests use."""

    def __init__(self, engines: Mapping[str, Engine], limits: Limits) -> None:
        self.metrics, self._limits = Metrics(), limits
        self._models = {name: Model(name, engine, self.metrics, limits) for name, engine in engines.items()}
        self.thread = EngineThread()
        for model in self.all():
            self.thread.add(model.worker)

    def all(self) -> list[Model]:
        return list(self._models.values())

    def find(self, name: str | None) -> Model:
        """The model with a name; with None, the first one. Raises ApiError for an unknown name."""
        model = self._models.get(next(iter(self._models)) if name is None else name)
        if model is None:
            known = "', '".join(self._models)
            message = f"The model '{name}' does not exist; this server has '{known}'."
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return model

    async def replace(self, name: str, engine: Engine) -> None:
        """Sends new requests to another engine; returns when the old one has answered those that had found it."""
        old, new = self._models[name], Model(name, engine, self.metrics, self._limits)
        self.thread.add(new.worker)
        self._models[name] = new
        while old.held or old.worker.open:
            await asyncio.sleep(0.05)
        await new.worker.call(partial(self.thread.remove, old.worker))
        del old
        if gc.get_freeze_count():
            gc.unfreeze()
            gc.collect()
            gc.freeze()
