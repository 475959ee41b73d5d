"""Fine-tuning: conversations → a model that answers, through the same loop as pretraining.

Only the batches differ: the mask leaves nothing but the assistant's words and tool calls to learn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import batch_losses
from quern.machine import Machine
from quern.mixture.prepare import Mixture, prepare_mixture
from quern.recipe import FOR_FINE_TUNING, FOR_RL, IN_FINE_TUNING, Recipe, Resolved, TrainRecipe
from quern.resolve import fine_tuning_rates, resolve, sft_batch_rule
from quern.runs.origin import Origin, compare, corpus_fingerprint, overlay, source_digest, with_absolute_paths
from quern.runs.public_data import fetch_conversations
from quern.runs.training import rates_fall, ready_model
from quern.stages.session import Opening, Session, main_first
from quern.terminal import counted
from quern.text.tokenizer import Tokenizer
from quern.train.state import TrainState, build_state, weights_of
from quern.train.step import Evaluator, TorchBackend
from quern.validate import check_rows

VAL_TOKENS = 1 << 15
FEW_STEPS = 50  # from 150 conversations, a small model learned sentences in 52 steps, and fragments in 20


def run(recipe: Recipe, session: Session) -> int:
    """Fine-tunes a base model, and returns an exit code of `train.guard`. On a mesh every rank calls this.

    It begins with the session's start, by default the base model of the run; `sft_recipe` says what of the recipe
    counts.

    Raises:
        FileNotFoundError, CheckpointError: There is no base model, or no good checkpoint of it.
        ValueError: The run was fine-tuned and `resume` was not asked for, or its conversations are others now.
        RunInUseError: Another process trains in the run.
    """
    with session.opened():
        return _run(with_absolute_paths(recipe), session)


def _run(asked: Recipe, session: Session) -> int:
    machine, run_dir, mesh, log = session.machine, session.run_dir, session.mesh, session.log
    session, first, base, tokenizer, start = session.begin(asked, "pretrain")
    lessons = prepare_lessons(asked, base, tokenizer, session, None if start else first)
    recipe, batches, talks = lessons.recipe, lessons.batches, lessons.talks
    digest = source_digest(session.source) or first.source
    made = {"conversations": lessons.fingerprint, "tests": talks.tests, "source": digest}
    origin = replace(first, recipe=recipe.to_json(), **made)
    changed = compare(None if start else first, origin, run_dir, session.stage, FOR_RL)
    weights = start and weights_of(start.tensors)
    model, facts, precision = ready_model(recipe, tokenizer, machine, mesh, log, weights=weights)
    state = build_state(recipe, machine, model, mesh)
    if start is not None and not state.go_on(start.tensors, start.state):
        log("the optimizer begins without the base model's state, which is another optimizer's")
    steps = recipe.sft.steps
    assert steps is not None  # `prepare_lessons` filled it in
    plan = session.plan(recipe, lessons.evaluator, steps=steps, schedule=rates_fall(steps, recipe.sft.warmdown_share))
    report = batches.report()
    talked = counted(talks.train.num_documents, "conversation")
    told = f"fine-tuning: {counted(plan.steps, 'step')} on {talked}{_lost(report, recipe)}"
    data = {name: round(value, 5) for name, value in report.items()} | precision | {"sources": talks.sources}
    opening = Opening([told, *talks.lines()], changed, tokenizer, start and start.facts_in(run_dir, facts), data)
    backend = TorchBackend(state, machine, recipe.train.clip_norm, recipe.seed)
    return session.train(backend, batches, plan, origin, opening)


@dataclass(frozen=True)
class Lessons:
    """Conversations that are ready to be trained on."""

    recipe: Resolved  # resolved, with the batch, the rates and the steps that follow from the conversations
    batches: Loader
    evaluator: Evaluator  # the loss on the held-out conversations
    talks: Mixture

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the conversations' tokens."""
        return corpus_fingerprint(self.talks.train, self.talks.val)


def prepare_lessons(
    asked: Recipe, base: Resolved, tokenizer: Tokenizer, session: Session, began: Origin | None
) -> Lessons:
    """Prepares the conversations, and refuses what fine-tuning on them would refuse. On a mesh every rank calls this.
    `quern run` calls this before pretraining too. asked: the user's recipe; base, tokenizer: recipe and tokenizer of
    the base model; began: what the stage began with, None for one that begins."""
    recipe, out, mesh = sft_recipe(asked, base), session.run_dir.out, session.mesh
    with main_first(mesh):
        fetch, tests = partial(fetch_conversations, out=out), began and began.tests
        talks = prepare_mixture(recipe, tokenizer, out, fetch, session.log, tests)
    recipe = fit_to_conversations(recipe, talks.train, mesh.dp)
    context, batch_tokens = recipe.model.context, recipe.sft.batch_tokens
    assert batch_tokens is not None  # `fit_to_conversations` filled it in
    rows, packing, too_long = batch_tokens // context, "first-fit-decreasing", recipe.sft.too_long
    # All documents in one group, because the sources of a mixture follow each other.
    batches = Loader(talks.train, context, rows, recipe.seed, packing, too_long=too_long, group_size=None)
    steps = recipe.sft.steps or max(1, round(batches.steps_per_epoch * recipe.sft.epochs))
    if recipe.sft.steps is None and steps < FEW_STEPS:
        session.log(
            f"warning: fine-tuning has {counted(steps, 'step')}, too few to learn to reply: give more conversations, "
            f"or --sft.epochs {math.ceil(FEW_STEPS / batches.steps_per_epoch)}, which makes at least {FEW_STEPS}"
        )
    every = {name: getattr(asked.train, name) or max(1, steps // 4) for name in ("eval_every", "save_every")}
    recipe = replace(recipe, sft=replace(recipe.sft, steps=steps), train=replace(recipe.train, **every))
    return Lessons(recipe, batches, _held_out_loss(talks.val, recipe, session.machine), talks)


def fit_to_conversations(recipe: Resolved, corpus: Corpus, replicas: int) -> Resolved:
    """Fills the batch of fine-tuning, where none was asked for, and the rates that fit it."""
    context = recipe.model.context
    tokens = int(np.minimum(corpus.lengths, context).sum())
    batch_tokens = recipe.sft.batch_tokens or sft_batch_rule(recipe, tokens, replicas)
    recipe = replace(recipe, sft=replace(recipe.sft, batch_tokens=batch_tokens))
    check_rows(TrainRecipe(), recipe.sft, context, replicas)  # a resumed run has a batch, and may have more ranks
    return fine_tuning_rates(recipe, recipe.sft.lr_share, batch_tokens)


def _lost(report: dict[str, float], recipe: Resolved) -> str:
    """Says how many of the conversations teach nothing, and why."""
    lost, long = int(report["documents_without_target"]), int(report["documents_too_long"])
    if not lost:
        return ""
    reason = "no reply within" if recipe.sft.too_long == "crop" else "more tokens than, or no reply within,"
    context = f"the context of {recipe.model.context:,} tokens"
    return f", {lost:,} of them lost, with {reason} {context} ({long:,} longer)"


def sft_recipe(asked: Recipe, base: Resolved) -> Resolved:
    """The base model's recipe, resolved except for what the conversations decide, with `sft`, the sources of
    conversations and the fields `IN_FINE_TUNING` that are asked for. Raises ValueError for values that do not fit."""
    return resolve(overlay(base, asked, (*FOR_FINE_TUNING, *IN_FINE_TUNING)))


def _held_out_loss(corpus: Corpus, recipe: Resolved, machine: Machine) -> Evaluator:
    """Measures the mean loss over the assistant's tokens in the first rows of held-out conversations, `VAL_TOKENS`
    tokens in all at most. The rows do not depend on the micro-batch."""
    loader = Loader(corpus, recipe.model.context, recipe.micro_batch_rows, 0, "first-fit-decreasing", too_long="crop")
    rows = min(loader.rows_per_epoch, max(1, VAL_TOKENS // loader.context))

    def evaluate(state: TrainState) -> dict[str, float]:
        nats, count = 0.0, 0
        for step in range(math.ceil(rows / loader.batch_rows)):
            batch = loader.batch(step)
            batch.mask[rows - step * loader.batch_rows :] = False
            losses = batch_losses(state.model, batch.tokens, batch.targets, machine)
            nats += float(losses[batch.mask].sum())
            count += int(np.count_nonzero(batch.mask))
        return {"val_loss": nats / max(1, count)}

    return evaluate
