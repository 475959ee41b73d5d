"""`Beginning`: what fine-tuning or reinforcement learning begins or continues with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quern.recipe import Recipe
from quern.runs.origin import Origin, read_origin, refuse_second_tokenizer, require_tokenizer
from quern.runs.run_dir import RunDir
from quern.runs.saved import NEWEST, Start, read_saved, read_start
from quern.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Beginning:
    """What a stage after pretraining begins or continues with.

    Args:
        recipe: Of the model.
        tokenizer: Of the model.
        start: The checkpoint to begin with; None if the stage began before.
        own: The checkpoint is of the same run.
        origin: Of the stage, if it began before and has one.
    """

    recipe: Recipe
    tokenizer: Tokenizer
    start: Start | None
    own: bool
    origin: Origin | None

    @property
    def lines(self) -> list[str]:
        """For the user: which weights of another run the stage begins with."""
        if self.start is None or self.own:
            return []
        step, run = self.start.base["step"], self.start.run_dir.run
        return [f"weights: step {step:,} of {self.start.stage} in run '{run}'"]

    @property
    def facts(self) -> dict[str, Any] | None:
        """For run.json, of a run that begins with another one's model."""
        return None if self.start is None or self.own else self.start.facts()

    @property
    def new_origin(self) -> Origin:
        """That of a stage that begins."""
        if self.start is None:
            return Origin(self.tokenizer.fingerprint)
        base = self.start.base | ({"run": None} if self.own else {})
        return replace(self.start.origin, tokenizer=self.tokenizer.fingerprint, base=base)

    def source(self, named: str | None) -> str | None:
        """The recipe file to keep with the stage: the one named, else that of the model that it starts from."""
        if named is not None or self.start is None:
            return named
        return self.start.run_dir.kept_source(self.start.stage)


def read_beginning(
    run_dir: RunDir,
    stage: str,
    before: Sequence[str],
    start: Start | None,
    log: Callable[[str], None],
    callables: dict[str, Callable[..., Any]] | None,
) -> Beginning:
    """Reads what a stage begins or continues with.

    Args:
        run_dir: The run.
        stage: The stage.
        before: Stages that have a model to begin with.
        start: The checkpoint to begin with; None: the newest of the run's stages `before`.
        log: Takes lines for the user.
        callables: The callables of the recipe, if the user named its file.

    Raises:
        FileNotFoundError: There is no model of the stages before.
        CheckpointError: No good checkpoint of it.
        ValueError: The run has another tokenizer.
    """
    own = start is None
    saved = read_saved(run_dir, stage, callables) if run_dir.has_trained(stage) else None
    if saved is None:
        start = start or read_start(run_dir, before, NEWEST, log, callables)
        tokenizer = start.run_dir.tokenizer()
        refuse_second_tokenizer(run_dir, tokenizer)
        return Beginning(start.recipe, tokenizer, start, own, None)
    origin, tokenizer = read_origin(run_dir.stage(stage)), run_dir.tokenizer()
    if origin is not None:
        require_tokenizer(run_dir, tokenizer, origin)
    return Beginning(saved, tokenizer, start, own, origin)
