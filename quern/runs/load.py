"""Opens checkpoints of a run: its trained model, or what another stage or run begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

import torch

from quern.data.token_file import fingerprint
from quern.machine import Machine
from quern.process import waiting
from quern.recipe import Resolved
from quern.records import Natural, typed
from quern.runs.origin import Origin, read_origin, require_same
from quern.runs.run_dir import BEFORE_WARMDOWN, NEWEST, RunDir, command_of
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, manifest
from quern.train.manifest import CheckpointError
from quern.train.state import build_model, checksum, weights_of

Code = Mapping[str, Callable[..., Any]] | None
"""The code of a recipe (`Recipe.callables`), where the user named its file; None reads the file saved with the run."""


class _StateFacts(TypedDict):
    step: Natural
    tokens: NotRequired[Natural]


class _Meta(TypedDict):
    """Facts that every checkpoint of a run has beside its tensors."""

    recipe: dict[str, Any]
    tokenizer: str
    state: _StateFacts


@dataclass(frozen=True)
class Start:
    """A loaded checkpoint. tensors: the fp32 masters and moments, unsharded."""

    run_dir: RunDir
    stage: str
    recipe: Resolved
    tokenizer: Tokenizer
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]  # the counters (`Counters.meta`)
    origin: Origin

    @property
    def step(self) -> int:
        return self.state["step"]

    def origin_in(self, run_dir: RunDir) -> Origin:
        """The origin of a stage of a run that begins with this checkpoint."""
        before = (self.origin.base or {}).get("tokens", 0) if self.stage == "pretrain" else 0
        run = None if self.run_dir == run_dir else self.run_dir.run
        base = {"run": run, "stage": self.stage, "step": self.step, "tokens": self.state["tokens"] + before}
        return replace(self.origin, base=base)

    def facts_in(self, run_dir: RunDir, own: dict[str, Any]) -> dict[str, Any] | None:
        """The facts for run.json of another run that begins with this checkpoint and prepares no text itself."""
        if self.run_dir == run_dir:
            return None
        known = self.run_dir.facts()
        return {name: known[name] for name in ("data", "tokenizer", "packing") if name in known} | own


@dataclass(frozen=True)
class LoadedModel:
    """A trained model, ready to generate."""

    model: Any
    tokenizer: Tokenizer
    recipe: Resolved
    stage: str
    step: int

    def weights(self) -> str:
        """16 hex digits over the weights, which tell a run that was trained again from the one before."""
        return fingerprint(*map(checksum, self.model.parameters()))[:16]


def load(
    run_dir: RunDir, machine: Machine, log: Callable[[str], None], stage: str | None = None, callables: Code = None
) -> LoadedModel:
    """Loads the newest intact checkpoint of a stage, by default of the last one that was trained.

    Raises:
        FileNotFoundError: There is no checkpoint; the message names the command to run first.
        CheckpointError, ValueError: The errors of `open_checkpoint`.
    """
    start = open_checkpoint(run_dir, run_dir.require_trained(stage)[-1], log, callables=callables)
    model = build_model(start.recipe, machine, None, weights_of(start.tensors))
    return LoadedModel(model.eval(), start.tokenizer, start.recipe, start.stage, start.step)


def open_start(run_dir: RunDir, stages: Sequence[str], log: Callable[[str], None], at: str, callables: Code) -> Start:
    """Loads the checkpoint that another run or stage starts from: `at`, in the first of these stages that has any.

    Raises FileNotFoundError if there is no such run, or no checkpoint, and the errors of `open_checkpoint`.
    """
    (stage,) = run_dir.require_trained(next(filter(run_dir.has_trained, stages), stages[0]))
    return open_checkpoint(run_dir, stage, log, at, callables)


def open_checkpoint(
    run_dir: RunDir, stage: str, log: Callable[[str], None], at: str = NEWEST, callables: Code = None
) -> Start:
    """Loads a checkpoint of a stage, and the run's tokenizer, which must be the checkpoint's.

    at: NEWEST, the newest intact one; BEFORE_WARMDOWN, kept from before the learning rates fell; or a step.

    Raises:
        CheckpointError: The checkpoint is damaged; for NEWEST, all of the stage are.
        FileNotFoundError: The tokenizer is lost.
        ValueError: `at` names no checkpoint, the checkpoint has a newer schema, the tokenizer is damaged or another
            one, or as `RunDir.read_recipe`.
    """
    tokenizer, folder = run_dir.tokenizer(), run_dir.checkpoints(stage)
    with waiting(f"the disk to read {folder}", log=log):
        if at == NEWEST:
            if (found := manifest.latest(folder, log)) is None:
                raise CheckpointError(
                    f"none of the checkpoints under {folder} is good: put back a copy of one, or remove the folder "
                    f"{folder.parent} and run `{command_of(stage)} {run_dir.flags}` again"
                )
            path = found[0]
        else:
            there = manifest.candidates(folder)
            step = int(at) if at.isdecimal() else None
            if at == BEFORE_WARMDOWN:
                step = max((one for one, path in there.items() if manifest.is_kept(path)), default=None)
            if step not in there:
                raise ValueError(f"--from-step {at}: run '{run_dir.run}' has only {NEWEST} and steps {sorted(there)}")
            manifest.verify(path := there[step])
        tensors, meta = checkpoint.load(path, verified=True)
    try:
        typed(meta, _Meta)
    except ValueError as error:
        raise CheckpointError(f"the manifest of {path} is damaged ({error}): remove this checkpoint") from error
    # The recipe is the checkpoint's; its code may have been named anew since the checkpoint was saved.
    origin = read_origin(run_dir.stage(stage), meta["recipe"]) or Origin.of_checkpoint(meta)
    recipe = run_dir.read_recipe(origin.recipe, stage, origin.source, callables)
    trained = replace(origin, tokenizer=meta["tokenizer"])
    require_same(trained, replace(trained, tokenizer=tokenizer.fingerprint), run_dir, stage)
    return Start(run_dir, stage, recipe, tokenizer, tensors, meta["state"], origin)
