"""Loads a trained model of a run, for evaluation, chat, the server and export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quern.machine import Machine
from quern.recipe import Recipe
from quern.stages.places import STAGES, Places
from quern.stages.sft import load_weights
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint
from quern.train.state import build_model, weights_of


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Tokenizer
    recipe: Recipe
    stage: str
    step: int


def load(
    places: Places,
    machine: Machine,
    say: Callable[[str], None],
    stage: str | None = None,
    make_model: Callable[..., Any] | None = None,
) -> Loaded:
    """The newest good checkpoint of a stage (by default of the last stage there is).

    make_model: needed when the run's recipe came from a file outside quern. Raises FileNotFoundError, saying what to
    run first, when there is no checkpoint.
    """
    tokenizer = places.tokenizer()
    for name in [stage] if stage else reversed(STAGES):
        found = checkpoint.latest(places.checkpoints(name), say)
        if found is None:
            continue
        tensors, meta = checkpoint.load(found[0])
        callables = {"make_model": make_model} if make_model else {}
        recipe = Recipe.from_json(meta["recipe"], **callables)
        if meta["tokenizer"] != tokenizer.fingerprint:
            raise ValueError(f"{found[0]} was trained with another tokenizer than {places.folder / 'tokenizer.json'}")
        model = build_model(recipe, machine, None)
        load_weights(model, weights_of(tensors))
        return Loaded(model.eval(), tokenizer, recipe, name, meta["state"]["step"])
    missing = f"stage '{stage}'" if stage else "checkpoint"
    raise FileNotFoundError(f"run '{places.run}' has no {missing} under {places.out}: {places.known()}")
