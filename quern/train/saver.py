"""Saves a run's checkpoints, at once or in the background while training continues.

In the background the rank's slices are copied first. A thread then saves them through collectives of its own
(`Mesh.files`), so the checkpoint is the same, byte for byte. At most one save runs at a time, and the next one, or the
end, raises its error on all ranks. The copies take as much memory as the rank's masters and moments.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quern.records import Records
from quern.train import checkpoint
from quern.train.backend import Backend


class Saver:
    """Saves below the folder of the records. Call `settle` when training ends.

    Attributes:
        step: The step that was saved last.
    """

    def __init__(self, backend: Backend, records: Records, keep: int, background: bool, meta: dict[str, Any]) -> None:
        self.step = backend.run.step
        self._backend, self._records, self._keep, self._meta = backend, records, keep, meta
        self._pool = ThreadPoolExecutor(1, "saver") if background else None
        self._pending: Future[Path] | None = None
        self._facts: dict[str, Any] = {}

    def save(self, kept: bool) -> None:
        """Saves the state. Raises CheckpointError for this save, or for the earlier save in the background."""
        self.settle()
        backend, start = self._backend, time.perf_counter()
        with backend.mesh.progress.during("saving"):
            self.step = step = backend.run.step
            slices = backend.save(copied=self._pool is not None)
            meta = self._meta | {"kept": kept, "state": backend.run.meta()}

            def write() -> Path:
                folder = self._records.path / "checkpoints"
                path = checkpoint.save(folder, step, slices, meta, self._keep, backend.mesh)
                self._facts["seconds"] = time.perf_counter() - start
                return path

            self._facts = {"step": step}
            if self._pool is None:
                self._record(write())
            else:
                self._facts["stood_still"] = time.perf_counter() - start
                self._pending = self._pool.submit(write)

    def settle(self) -> None:
        """Waits for the save in the background, if there is one, and raises its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            with self._backend.mesh.progress.during("saving"):
                self._record(pending.result())

    def _record(self, path: Path) -> None:
        facts = {name: round(value, 3) for name, value in self._facts.items()}
        self._records.event("save", path=path.name, **facts)
