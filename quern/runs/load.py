"""Loads the trained model of a run for evaluation, chat, the server and export."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quern.machine import Machine
from quern.recipe import Recipe
from quern.runs.origin import require_tokenizer
from quern.runs.run_dir import RunDir
from quern.runs.saved import open_checkpoint
from quern.text.tokenizer import Tokenizer
from quern.train import manifest
from quern.train.manifest import CheckpointError
from quern.train.replicas import checksum
from quern.train.state import build_model, weights_of
from quern.waits.waiting import waiting


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    tokenizer: Tokenizer
    recipe: Recipe
    stage: str
    step: int

    def weights(self) -> str:
        """16 hex digits over the weights, which tell a run that was trained again from the one before."""
        sums = [checksum(parameter).item() for parameter in self.model.parameters()]
        return hashlib.sha256(repr(sums).encode("ascii")).hexdigest()[:16]


def load(
    run_dir: RunDir,
    machine: Machine,
    log: Callable[[str], None],
    stage: str | None = None,
    callables: Mapping[str, Callable[..., Any]] | None = None,
) -> LoadedModel:
    """Loads the newest intact checkpoint.

    Args:
        run_dir: The run.
        machine: The device and dtype of the model.
        log: Called with lines for the user.
        stage: The stage to load; by default the last one that has an intact checkpoint.
        callables: The recipe's code (`Recipe.callables`); by default the file saved with the run is used.

    Raises:
        FileNotFoundError: There is no checkpoint; the message names the command to run first.
        CheckpointError: All checkpoints are damaged.
    """
    trained = run_dir.require_trained(stage)
    tokenizer = run_dir.tokenizer()
    for name in reversed(trained):
        if found := manifest.latest(run_dir.checkpoints(name), log):
            with waiting(f"the disk to read {found[0]}", log=log):
                start = open_checkpoint(run_dir, name, found[0], callables)
            require_tokenizer(run_dir, tokenizer, replace(start.origin, tokenizer=start.meta["tokenizer"]))
            model = build_model(start.recipe, machine, None, weights_of(start.tensors))
            return LoadedModel(model.eval(), tokenizer, start.recipe, name, start.meta["state"]["step"])
    raise CheckpointError(run_dir.no_good_checkpoint(trained[-1]))
