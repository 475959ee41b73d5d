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

from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import batch_losses
from quern.machine import Machine
from quern.mesh import Mesh, alone
from quern.model.count import flops_per_token
from quern.optim.schedule import multipliers
from quern.parallel.plan import shard_model
from quern.recipe import REFERENCE_BATCH_TOKENS, Recipe, resolve
from quern.stages.places import Places
from quern.stages.prepare import fetch
from quern.stages.pretrain import compile_model, micro_batch_rows
from quern.stages.progress import Meter
from quern.stages.start import lower_precision, measure_peak_flops, open_folder, refuse_other_recipe, show_training
from quern.text import hub, tinyworld
from quern.text.chat import Message, render
from quern.text.documents import read_conversations
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, loop
from quern.train.guard import EXIT_DONE
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
    """Fine-tunes the run's base model; returns an exit code. recipe: unresolved. On a mesh every rank calls this.

    Raises FileNotFoundError without a base model, ValueError when it was fine-tuned and `resume` was not asked for.
    """
    mesh, path = mesh or alone(), places.stage("sft")
    if checkpoint.steps(path / "checkpoints") and not resume:
        raise ValueError(
            f"run '{places.run}' has been fine-tuned already: go on with --resume, or name another run with --run"
        )
    tokenizer = places.tokenizer()
    base = checkpoint.latest(places.checkpoints("pretrain"), say)
    if base is None:
        raise FileNotFoundError(f"run '{places.run}' has no base model: run `quern pretrain --run {places.run}` first")
    tensors, meta = checkpoint.load(base[0])
    resolve(recipe)  # refuses bad values
    recipe = _follow(recipe, Recipe.from_json(meta["recipe"], **(recipe.callables() if source else {})))
    context = recipe.model.context
    assert context and recipe.sft.batch_tokens
    train_corpus, val_corpus = conversations(recipe, tokenizer, places.out)
    rows = max(1, recipe.sft.batch_tokens // context)
    loader = Loader(train_corpus, context, rows, recipe.seed, "first-fit-decreasing", too_long=recipe.sft.too_long)
    steps = recipe.sft.steps or max(1, round(loader.steps_per_epoch * recipe.sft.epochs))
    recipe = replace(recipe, sft=replace(recipe.sft, steps=steps))
    if resume:
        refuse_other_recipe(recipe, path)
    model = build_model(recipe, machine, None)
    load_weights(model, weights_of(tensors))
    shard_model(model, mesh)
    precision = lower_precision(recipe, model, say)
    state = build_state(recipe, machine, model, mesh)
    compile_model(state.model, machine)
    with open_folder(path, recipe, source, trackers, mesh) as folder:
        if resume and loop.resume(state, folder, say):
            say(f"resumed at step {state.step:,}")
        sft = recipe.sft
        plan = loop.Plan(
            steps=steps,
            schedule=lambda step: multipliers(
                step, steps, warmup_steps=0, warmdown_share=sft.warmdown_share, final_lr=0.0
            ),
            micro_batch_rows=micro_batch_rows(recipe),
            clip_norm=recipe.train.clip_norm,
            log_every=recipe.train.log_every,
            save_every=max(1, steps // 4),
            keep=recipe.train.keep,
            save_in_background=recipe.train.save_in_background,
            flops_per_token=flops_per_token(recipe),
            peak_flops=measure_peak_flops(machine) * mesh.world.size,
            evaluators=[(max(1, steps // 4), held_out_loss(val_corpus, recipe, machine))],
            meta={"recipe": recipe.to_json(), "tokenizer": tokenizer.fingerprint, "seed": recipe.seed},
        )
        report = loader.report()
        folder.event("data", **{name: round(value, 5) for name, value in report.items()}, **precision)
        say(f"fine-tuning: {steps:,} steps on {train_corpus.num_documents:,} conversations")
        with Meter("fine-tuning", steps, "steps", silent=not mesh.main) as meter:
            code = loop.train(state, loader, plan, machine, folder, meter.say, show_training(meter))
    if code == EXIT_DONE:
        say(f"fine-tuned in {state.seconds:,.0f} s of steps → {path}")
    return code


def _follow(recipe: Recipe, base: Recipe) -> Recipe:
    """The base model's recipe with this one's fine-tuning: the weights' shape, and rates that fit the batch."""
    batch_tokens = recipe.sft.batch_tokens or base.sft.batch_tokens
    assert batch_tokens
    scale = recipe.sft.lr_share * math.sqrt(batch_tokens / REFERENCE_BATCH_TOKENS)
    optim = replace(base.optim, lr_scale=scale, matrix_decay=0.0)
    sft = replace(recipe.sft, batch_tokens=batch_tokens)
    return replace(base, optim=optim, sft=sft, conversations=recipe.conversations)


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
            raise ValueError(f"{source} holds {len(every)} conversations: fine-tuning needs at least 2")
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
