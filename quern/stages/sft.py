"""Fine-tuning: conversations → a model that answers, through the same loop as pretraining.

Only the batches differ: the mask leaves nothing but the assistant's words and tool calls to learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import batch_losses
from quern.machine import Machine
from quern.mixture.prepare import Mixture, prepare_mixture
from quern.model.count import count
from quern.optim.schedule import Multipliers, multipliers
from quern.parallel.plan import shard_model
from quern.recipe import FOR_RL, IN_FINE_TUNING, Recipe, TrainRecipe
from quern.resolve import fine_tuning_rates, resolve, sft_batch_rule
from quern.runs.beginning import read_beginning
from quern.runs.origin import (
    Origin,
    corpus_fingerprint,
    read_origin,
    refuse_other_conversations,
    source_digest,
    with_absolute_paths,
)
from quern.runs.public_data import fetch_conversations
from quern.runs.run_dir import RunDir
from quern.runs.saved import changes
from quern.runs.training import set_up_training
from quern.stages.session import Session, main_first
from quern.terminal import counted
from quern.text.tokenizer import Tokenizer
from quern.train import manifest
from quern.train.backend import Evaluator
from quern.train.state import TrainState, build_model, build_state, weights_of
from quern.validate import check_rows


def run(recipe: Recipe, session: Session) -> int:
    """Fine-tunes a base model. On a mesh every rank calls this.

    Args:
        recipe: What the user asked for; `sft_recipe` says which of it counts.
        session: Where, and how the command was given. Its start is the model to fine-tune, by default the base model
            of the run.

    Returns:
        An exit code of `train.guard`.

    Raises:
        FileNotFoundError: There is no base model.
        CheckpointError: No good checkpoint of it.
        ValueError: The run was fine-tuned and `resume` was not asked for, or its conversations are others now.
        RunInUseError: Another process trains in the run.
    """
    run_dir = session.run_dir
    if session.start is None and not run_dir.folder.exists():
        raise FileNotFoundError(f"there is no run '{run_dir.run}' under {run_dir.out}: {run_dir.known()}")
    with session.opened(
        "fine-tuned already: continue with --resume, or fine-tune again under another name with "
        f"`quern sft --from {run_dir.run} --run NAME`"
    ):
        return _run(recipe, session)


def _run(asked: Recipe, session: Session) -> int:
    machine, run_dir, mesh, log, source = session.machine, session.run_dir, session.mesh, session.log, session.source
    asked = with_absolute_paths(asked)
    first = read_beginning(run_dir, "sft", ("pretrain",), session.start, log, asked.callables() if source else None)
    tokenizer = first.tokenizer
    lessons = prepare_lessons(asked, first.recipe, tokenizer, session)
    recipe, batches, talks = lessons.recipe, lessons.batches, lessons.talks
    model = build_model(recipe, machine, None, first.start and weights_of(first.start.tensors))
    counts = count(model)
    shard_model(model, mesh)
    changed = changes(recipe, session.folder, FOR_RL) if session.resume else []
    precision = set_up_training(recipe, model, tokenizer, machine, log)
    state = build_state(recipe, machine, model, mesh)
    if first.start is not None and not state.go_on(first.start.tensors, first.start.meta["state"]):
        log("the optimizer begins without the base model's state, which is another optimizer's")
    found = corpus_fingerprint(talks.train, talks.val)
    if first.origin is not None:
        refuse_other_conversations(run_dir, first.origin, found)
        _mention_later_base(first.origin, run_dir, log)
    new = first.new_origin
    new = replace(new, conversations=found, source=source_digest(source) or new.source)
    origin = first.origin or new
    plan = session.plan(
        recipe,
        origin,
        steps=recipe.sft.steps,
        schedule=rates_fall(recipe.sft.steps, recipe.sft.warmdown_share),
        evaluator=lessons.evaluator,
    )
    report = batches.report()
    talked = counted(talks.train.num_documents, "conversation")
    told = f"fine-tuning: {counted(plan.steps, 'step')} on {talked}{_lost(report, recipe)}"
    return session.train(
        recipe,
        state,
        batches,
        plan,
        origin,
        words=("fine-tuning", "fine-tuned"),
        lines=[*first.lines, told, *talks.lines()],
        counts=counts,
        facts=first.facts and first.facts | precision,
        tokenizer=tokenizer,
        source=first.source(source),
        changed=changed,
        data={name: round(value, 5) for name, value in report.items()} | precision | {"sources": talks.sources},
    )


@dataclass(frozen=True)
class Lessons:
    """Conversations that are ready to be trained on.

    Args:
        recipe: Resolved, with the batch, the rates and the steps that follow from the conversations.
        batches: Of the training conversations.
        evaluator: The loss on the held-out ones.
        talks: Both, and a record of their sources.
    """

    recipe: Recipe
    batches: Loader
    evaluator: Evaluator
    talks: Mixture


def prepare_lessons(asked: Recipe, base: Recipe, tokenizer: Tokenizer, session: Session) -> Lessons:
    """Prepares the conversations, and refuses what fine-tuning on them would refuse.

    `quern run` calls this before pretraining too. On a mesh every rank calls this.

    Args:
        asked: What the user asked for.
        base: The base model's recipe, resolved.
        tokenizer: The base model's.
        session: Where.

    Raises:
        ValueError: A value, a conversation or the number of ranks is wrong, or there is nothing to learn.
        OSError: A file cannot be read or downloaded.
    """
    recipe, out, mesh = sft_recipe(asked, base), session.run_dir.out, session.mesh
    with main_first(mesh):
        talks = prepare_mixture(recipe, tokenizer, out, partial(fetch_conversations, out=out), session.log)
    recipe = fit_to_conversations(recipe, talks.train, mesh.dp)
    batches = _loader(recipe, talks.train)
    recipe = _with_steps(recipe, asked, batches.steps_per_epoch)
    return Lessons(recipe, batches, held_out_loss(talks.val, recipe, session.machine), talks)


def fit_to_conversations(recipe: Recipe, corpus: Corpus, replicas: int) -> Recipe:
    """Fills the batch of fine-tuning, where none was asked for, and the rates that fit it."""
    context = recipe.model.context
    assert context
    tokens = int(np.minimum(corpus.lengths, context).sum())
    batch_tokens = recipe.sft.batch_tokens or sft_batch_rule(recipe, tokens, replicas)
    recipe = replace(recipe, sft=replace(recipe.sft, batch_tokens=batch_tokens))
    check_rows(TrainRecipe(), recipe.sft, context, replicas)  # a resumed run has a batch, and may have more ranks
    return fine_tuning_rates(recipe, recipe.sft.lr_share, batch_tokens)


def _lost(report: dict[str, float], recipe: Recipe) -> str:
    """Says how many of the conversations teach nothing, and why."""
    lost, long = int(report["documents_without_target"]), int(report["documents_too_long"])
    if not lost:
        return ""
    reason = "no reply within" if recipe.sft.too_long == "crop" else "more tokens than, or no reply within,"
    context = f"the context of {recipe.model.context:,} tokens"
    return f", {lost:,} of them lost, with {reason} {context} ({long:,} longer)"


def _mention_later_base(origin: Origin, run_dir: RunDir, log: Callable[[str], None]) -> None:
    """Says so where the run's base model was trained on after fine-tuning began with it."""
    newest = max(manifest.steps(run_dir.checkpoints("pretrain")), default=0)
    if origin.base is not None and origin.base["run"] is None and newest > origin.base["step"]:
        log(
            f"fine-tuning began with step {origin.base['step']:,} of the base model, which has {newest:,} now: to "
            f"fine-tune that one, `quern sft --from {run_dir.run} --run NAME`"
        )


def sft_recipe(asked: Recipe, base: Recipe) -> Recipe:
    """The base model's recipe with the fields asked for fine-tuning, resolved except for what the conversations decide.

    asked: unresolved; of it count `sft`, where the conversations come from, and the fields `IN_FINE_TUNING`. Raises
    ValueError for values that would not do.
    """
    own = {name.removeprefix("train."): getattr(asked.train, name.removeprefix("train.")) for name in IN_FINE_TUNING}
    text = replace(base.text, tinyworld_conversations=asked.text.tinyworld_conversations)
    train = replace(base.train, **own)
    return resolve(replace(base, text=text, train=train, sft=asked.sft, conversations=asked.conversations))


def _loader(recipe: Recipe, corpus: Corpus) -> Loader:
    context, batch_tokens = recipe.model.context, recipe.sft.batch_tokens
    assert context and batch_tokens
    rows, too_long = batch_tokens // context, recipe.sft.too_long
    # All documents in one group, because the sources of a mixture follow each other.
    return Loader(corpus, context, rows, recipe.seed, "first-fit-decreasing", too_long=too_long, group_size=None)


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


def rates_fall(steps: int | None, share: float) -> Callable[[float], Multipliers]:
    """Rates that fall to zero over this share of the steps; what grows in pretraining (`progress`) has grown."""
    assert steps

    def schedule(step: float) -> Multipliers:
        told = multipliers(step, steps, warmup_steps=0, warmdown_share=share, final_lr=0.0)
        return told._replace(progress=1.0)

    return schedule


def require_same_conversations(recipe: Recipe, run_dir: RunDir) -> None:
    """Raises ValueError where the conversations are others than those that fine-tuning began with."""
    origin = read_origin(run_dir.stage("sft"))
    if origin is not None:
        fetched = partial(fetch_conversations, out=run_dir.out)
        talks = prepare_mixture(recipe, run_dir.tokenizer(), run_dir.out, fetched, lambda line: None)
        found = corpus_fingerprint(talks.train, talks.val)
        refuse_other_conversations(run_dir, origin, found)


def held_out_loss(corpus: Corpus, recipe: Recipe, machine: Machine) -> Evaluator:
    """Mean loss over the assistant's tokens of held-out conversations."""
    assert recipe.model.context
    rows = recipe.micro_batch_rows
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
