"""Fine-tuning: conversations → a model that answers, through the same loop as pretraining.

Only the batches differ: the mask leaves nothing but the assistant's words and tool calls to learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import batch_losses
from quern.machine import Machine
from quern.mesh import Mesh, alone
from quern.optim.schedule import Multipliers, multipliers
from quern.parallel.plan import shard_model
from quern.recipe import IN_FINE_TUNING, REFERENCE_BATCH_TOKENS, Recipe, SftRecipe, resolve
from quern.stages.places import Places
from quern.stages.prepare import fetch
from quern.stages.pretrain import compile_model, make_plan, micro_batch_rows
from quern.stages.start import (
    lower_precision,
    open_folder,
    refuse_other_recipe,
    train_with_meter,
)
from quern.text import hub, tinyworld
from quern.text.chat import Message, render
from quern.text.documents import read_conversations
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, loop
from quern.train.guard import EXIT_DONE
from quern.train.manifest import CheckpointError
from quern.train.state import TrainState, build_model, build_state, weights_of

HELD_OUT_EVERY = 50


def run(
    recipe: Recipe,
    machine: Machine,
    places: Places,
    *,
    resume: bool,
    source: str | None,
    say: Callable[[str], None],
    trackers: tuple = (),
    mesh: Mesh | None = None,
) -> int:
    """Fine-tunes the run's base model; returns an exit code. On a mesh every rank calls this.

    recipe: unresolved; what counts of it is `follow`'s. Raises FileNotFoundError without a base model, CheckpointError
    without a good one, ValueError when it was fine-tuned and `resume` was not asked for.
    """
    mesh, path = mesh or alone(), places.stage("sft")
    if checkpoint.steps(path / "checkpoints") and not resume:
        raise ValueError(
            f"run '{places.run}' has been fine-tuned already: go on with --resume, or name another run with --run"
        )
    asked, tokenizer = recipe, places.tokenizer()
    base, weights = _base_model(places, recipe.callables() if source else {}, say)
    recipe = follow(asked, base)
    model = build_model(recipe, machine, None)
    load_weights(model, weights)
    shard_model(model, mesh)
    train_corpus, val_corpus = conversations(recipe, tokenizer, places.out)
    loader = _loader(recipe, train_corpus)
    recipe = _with_steps(recipe, asked, loader.steps_per_epoch)
    if resume:
        refuse_other_recipe(recipe, path)
    precision = lower_precision(recipe, model, say)
    state = build_state(recipe, machine, model, mesh)
    compile_model(state.model, machine)
    evaluator = held_out_loss(val_corpus, recipe, machine)
    assert recipe.sft.steps
    plan = make_plan(recipe, machine, mesh, recipe.sft.steps, _schedule(recipe.sft), evaluator, tokenizer.fingerprint)
    with open_folder(path, recipe, source, trackers, mesh) as folder:
        if resume and loop.resume(state, folder, say):
            say(f"resumed at step {state.step:,}")
        packing = {name: round(value, 5) for name, value in loader.report().items()}
        folder.event("data", **packing, **precision)
        say(f"fine-tuning: {plan.steps:,} steps on {train_corpus.num_documents:,} conversations")
        code = train_with_meter("fine-tuning", state, loader, plan, machine, folder, mesh)
    if code == EXIT_DONE:
        say(f"fine-tuned in {state.seconds:,.0f} s of steps → {path}")
    return code


def _base_model(
    places: Places, callables: dict[str, Callable[..., Any]], say: Callable[[str], None]
) -> tuple[Recipe, dict[str, torch.Tensor]]:
    """The pretrained model's recipe, with this code, and its fp32 weights by name."""
    found = checkpoint.latest(places.checkpoints("pretrain"), say)
    if found is None and checkpoint.steps(places.checkpoints("pretrain")):
        raise CheckpointError(places.no_good_checkpoint("pretrain"))
    if found is None:
        raise FileNotFoundError(f"run '{places.run}' has no base model: run `quern pretrain --run {places.run}` first")
    tensors, meta = checkpoint.load(found[0])
    return places.read_recipe(meta["recipe"], "pretrain", callables), weights_of(tensors)


def follow(asked: Recipe, base: Recipe) -> Recipe:
    """The base model's recipe with what is asked for fine-tuning, and rates that fit the batch; resolved.

    asked: unresolved; of it count `sft`, where the conversations come from, and the fields `IN_FINE_TUNING`. Raises
    ValueError for values that would not do.
    """
    own = {name.removeprefix("train."): getattr(asked.train, name.removeprefix("train.")) for name in IN_FINE_TUNING}
    text = replace(base.text, tinyworld_conversations=asked.text.tinyworld_conversations)
    recipe = replace(
        base, text=text, train=replace(base.train, **own), sft=asked.sft, conversations=asked.conversations
    )
    recipe = resolve(recipe)
    assert recipe.sft.batch_tokens
    scale = recipe.sft.lr_share * math.sqrt(recipe.sft.batch_tokens / REFERENCE_BATCH_TOKENS)
    return replace(recipe, optim=replace(recipe.optim, lr_scale=scale, matrix_decay=0.0))


def _loader(recipe: Recipe, corpus: Corpus) -> Loader:
    context, batch_tokens = recipe.model.context, recipe.sft.batch_tokens
    assert context and batch_tokens
    rows = batch_tokens // context
    return Loader(corpus, context, rows, recipe.seed, "first-fit-decreasing", too_long=recipe.sft.too_long)


def _with_steps(recipe: Recipe, asked: Recipe, steps_per_epoch: int) -> Recipe:
    """The recipe with the length of the run, and four validations and checkpoints unless their number was asked for."""
    steps = recipe.sft.steps or max(1, round(steps_per_epoch * recipe.sft.epochs))
    quarter = max(1, steps // 4)
    train = replace(
        recipe.train,
        eval_every=asked.train.eval_every or quarter,
        save_every=asked.train.save_every or quarter,
    )
    return replace(recipe, sft=replace(recipe.sft, steps=steps), train=train)


def _schedule(sft: SftRecipe) -> Callable[[int], Multipliers]:
    steps, share = sft.steps, sft.warmdown_share
    assert steps
    return lambda step: multipliers(step, steps, warmup_steps=0, warmdown_share=share, final_lr=0.0)


def load_weights(model: Any, weights: dict[str, Any]) -> None:
    """Copies weights by parameter name into the model, in its own dtype; every name must fit."""
    model.load_state_dict(weights, strict=True)


def conversations(recipe: Recipe, tokenizer: Tokenizer, out: Path) -> tuple[Corpus, Corpus]:
    """Training and held-out conversations as masked token ids. Raises ValueError when there are too few."""
    if recipe.conversations is None:
        count = recipe.text.tinyworld_conversations
        train = list(tinyworld.conversations(recipe.seed, count, "train"))
        val = list(tinyworld.conversations(recipe.seed, max(8, count // HELD_OUT_EVERY), "val"))
    else:
        source = recipe.conversations
        if source in hub.DATASETS and not Path(source).exists():
            source = str(fetch(source, out) / "train")
        every = list(read_conversations(source))
        if len(every) < 2:
            count = f"{len(every)} conversation" + ("s" if len(every) != 1 else "")
            raise ValueError(f"{source} holds {count}: fine-tuning needs at least 2")
        held_out = max(1, len(every) // HELD_OUT_EVERY)
        train, val = every[held_out:], every[:held_out]
    return _corpus(tokenizer, train), _corpus(tokenizer, val)


def _corpus(tokenizer: Tokenizer, every: list[list[Message]]) -> Corpus:
    pairs = [render(tokenizer, messages) for messages in every]
    return Corpus.from_arrays([ids for ids, _ in pairs], [mask for _, mask in pairs])


def held_out_loss(corpus: Corpus, recipe: Recipe, machine: Machine) -> loop.Evaluator:
    """Mean loss over the assistant's tokens of held-out conversations."""
    assert recipe.model.context
    rows = micro_batch_rows(recipe)
    loader = Loader(corpus, recipe.model.context, rows, 0, "first-fit-decreasing", too_long="crop")

    def evaluate(state: TrainState) -> dict[str, float]:
        nats, count = 0.0, 0
        for batch in _once(loader):
            losses = batch_losses(state.model, batch.tokens, batch.targets, machine)
            nats += float(losses[batch.mask].sum())
            count += int(np.count_nonzero(batch.mask))
        return {"val_loss": nats / max(1, count)}

    return evaluate


def _once(loader: Loader) -> Iterator[Any]:
    return islice((loader.batch(step) for step in range(loader.steps_per_epoch)), 8)
