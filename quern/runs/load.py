"""Loads a trained model of a run, for evaluation, chat, the server and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quern.machine import Machine
from quern.recipe import Recipe
from quern.runs.origin import Origin, read_origin, require_tokenizer
from quern.runs.run_dir import STAGES, RunDir
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint
from quern.train.manifest import CheckpointError
from quern.train.state import build_model, weights_of


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    tokenizer: Tokenizer
    recipe: Recipe
    stage: str
    step: int


def load(
    run_dir: RunDir,
    machine: Machine,
    log: Callable[[str], None],
    stage: str | None = None,
    callables: Mapping[str, Callable[..., Any]] | None = None,
) -> LoadedModel:
    """The newest good checkpoint of a stage (by default of the last stage there is).

    callables: those of the recipe (`Recipe.callables`), where the user named its file; by default the file that the run
    keeps is used. Raises
    FileNotFoundError, saying what to run first, when there is no checkpoint, CheckpointError when none is good.
    """
    tokenizer = run_dir.tokenizer()
    damaged = [name for name in ([stage] if stage else STAGES) if checkpoint.steps(run_dir.checkpoints(name))]
    for name in reversed(damaged):
        found = checkpoint.latest(run_dir.checkpoints(name), log)
        if found is None:
            continue
        tensors, meta = checkpoint.load(found[0])
        origin = read_origin(run_dir.stage(name)) or Origin(meta["tokenizer"])
        recipe = run_dir.read_recipe(meta["recipe"], name, origin.source, callables)
        require_tokenizer(run_dir, tokenizer, replace(origin, tokenizer=meta["tokenizer"]))
        model = build_model(recipe, machine, None)
        model.load_state_dict(weights_of(tensors))
        return LoadedModel(model.eval(), tokenizer, recipe, name, meta["state"]["step"])
    if damaged:
        raise CheckpointError(run_dir.no_good_checkpoint(damaged[-1]))
    raise FileNotFoundError(run_dir.has_no(f"stage '{stage}'" if stage else "model", stage or "run"))
