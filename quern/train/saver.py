"""Saves the checkpoint of a step, at once or in the background while training continues.

In the background the rank's slices are copied first. A thread then saves them through collectives of its own
(`Mesh.files`), so the checkpoint is the same, byte for byte. At most one save runs at a time; the next save waits for
it. Its error is raised at the next save or at the end, on all ranks. The copies take as much memory as the rank's
masters and moments.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from quern.records import Records
from quern.train import checkpoint
from quern.train.state import TrainState


class Saver:
    """Saves into a folder. Call `settle` when training ends.

    Args:
        keep: See `checkpoint.save`.
    """

    def __init__(self, folder: Path, records: Records, keep: int, in_background: bool = False) -> None:
        self.folder, self.records, self.keep, self.in_background = folder, records, keep, in_background
        self._thread: threading.Thread | None = None
        self._facts: dict[str, Any] = {}
        self._error: Exception | None = None

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Saves the state. Raises CheckpointError for this save, or for the earlier save in the background."""
        self.settle()
        start, mesh, slices = time.perf_counter(), state.optimizer.mesh, state.slices()
        meta = {**meta, "state": state.meta()}
        if not self.in_background:
            path = checkpoint.save(self.folder, state.step, slices, meta, self.keep, mesh=mesh)
            self._record(step=state.step, path=path.name, seconds=time.perf_counter() - start)
            return
        copies = {
            name: replace(part, tensor=part.tensor.detach().to("cpu", copy=True))
            for name, part in slices.items()
            if part.saved
        }
        step, stood_still = state.step, time.perf_counter() - start

        def write() -> None:
            try:
                path = checkpoint.save(self.folder, step, copies, meta, self.keep, mesh=mesh)
            except Exception as error:  # of any kind: `settle` raises it in the main thread
                self._error = error
            else:
                took = time.perf_counter() - start
                self._facts = {"step": step, "path": path.name, "seconds": took, "stood_still": stood_still}

        self._thread = threading.Thread(target=write, name="saver")
        self._thread.start()

    def settle(self) -> None:
        """Waits for the save in the background, if there is one, and raises its error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._record(**self._facts)

    def _record(self, **facts: Any) -> None:
        self.records.event("save", **{k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()})
