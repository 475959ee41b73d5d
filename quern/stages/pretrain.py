"""Pretraining: prepared text → a base model, through the one loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quern import validate
from quern.data.shards import Corpus
from quern.estimate.memory_check import memory_check
from quern.estimate.own_text import LEAST_BYTES, MINUTES, best_depth, expectation, most_readings, parameters_of
from quern.generate.engine import Engine
from quern.machine import measure_peak_flops
from quern.model.base import LanguageModel
from quern.optim.schedule import Multipliers
from quern.process import waiting
from quern.recipe import FOR_FINE_TUNING, FOR_RL, Recipe, Resolved
from quern.resolve import batch_rule, resolve
from quern.runs.load import Start
from quern.runs.origin import Origin, compare, read_origin, source_digest, with_absolute_paths
from quern.runs.public_data import name_of_set, with_shards
from quern.runs.training import fit_to_text, make_batches, ready_model, validation, with_vocabulary
from quern.stages.complete import GOES_ON, continuations, continued
from quern.stages.prepare import Prepared, fit_vocabulary, own_megabytes
from quern.stages.session import Opening, Session
from quern.stages.tokenizers import named_tokenizer
from quern.terminal import counted, duration, human_size, silent
from quern.text.tokenizer import Tokenizer
from quern.train import loop
from quern.train.guard import EXIT_DONE
from quern.train.horizon import recorded_plans
from quern.train.state import build_state, refuse_other_weights, weights_of
from quern.train.step import TorchBackend, accumulate, send_batch

CALIBRATION_STEPS = 8
SHOWN = 2  # continuations that are shown at the end
MANY_EPOCHS = 4
"""Up to about so many passes, repeated text is worth nearly as much as new text (Muennighoff et al., 2023, "Scaling
data-constrained language models")."""
TYPICAL_MFU = 0.5  # the share of the measured speed in matrix products that training reaches on a GPU, about
OTHER_WORK = 3.3e11
"""FLOP/s of training on one thread of a CPU if matrix products took no time: attention, the loss and copies take about
as long whatever its matrix units. It predicts three CPUs, of 0.43, 0.9 and 2.5 TFLOP/s in products, to within 16 %."""
LENGTHS = ("train.steps", "train.minutes", "train.horizon_ratio")

Check = Callable[[Resolved, Tokenizer], None]
"""Takes the resolved recipe and the tokenizer, and raises what a later stage would refuse."""


def run(recipe: Recipe, session: Session, check: Check = lambda recipe, tokenizer: None) -> int:
    """Trains to the recipe's horizon, and returns an exit code of `train.guard`. On a mesh every rank calls this.

    check: called by every rank when the text is prepared, before the model is built.

    Raises:
        ValueError: The run exists and `resume` was not asked for; or its recipe, text or tokenizer is another one.
        RunInUseError: Another process trains in the run.
    """
    if recipe.train.minutes is not None and session.mesh.tp > 1:  # timed steps change a shard, which cannot be redrawn
        raise ValueError("train.minutes cannot be measured with --tp: give train.steps instead")
    with session.opened():
        return _run(with_absolute_paths(recipe), session, check)


def _run(asked: Recipe, session: Session, check: Check) -> int:
    machine, run_dir, mesh, start = session.machine, session.run_dir, session.mesh, session.start
    began = read_origin(session.folder) if session.resume else None
    fitted = _fit(asked, session, began, check)
    recipe, prepared = fitted.recipe, fitted.prepared
    first = began or (start and start.origin_in(run_dir))
    source = source_digest(session.source) or (began and began.source)
    origin = replace(prepared.origin, recipe=recipe.to_json(), source=source, base=first and first.base)
    changed = compare(began, origin, run_dir, session.stage, besides=(*FOR_FINE_TUNING, *FOR_RL))
    if recipe.make_batches is not None and any(line.startswith("train.steps ") for line in changed):
        raise ValueError(
            "train.steps cannot change in a run whose recipe makes its own batches, since they may follow the number "
            f"of steps: train on from its model with `quern pretrain {run_dir.start_flags}`"
        )
    batches = make_batches(recipe, prepared.train)
    state = build_state(recipe, machine, fitted.model, mesh)
    if start is not None:
        fits = state.go_on(start.tensors, start.state)
        moments = "with its optimizer state" if fits else "without its optimizer state: the optimizer is another one"
        session.log(f"weights: step {start.step:,} of {start.stage} in run '{start.run_dir.run}'; {moments}")
    plan = _plan(recipe, session, prepared, changed)
    packing = {"method": getattr(recipe.make_batches, "__qualname__", recipe.train.packing), **batches.report()}
    lines = overview(fitted, plan, session)
    if packing.get("cropped_share", 0) > 0:
        instead = "" if recipe.make_batches else ": --train.packing best-fit loses none"
        lines.append(f"{packing['cropped_share']:.1%} of the text is in no row{instead}")
    lines.append(f"pretraining: {counted(plan.steps, 'step')} of {recipe.train.batch_tokens:,} tokens")
    facts = prepared.facts and {**prepared.facts, **fitted.facts, "packing": packing}
    backend = TorchBackend(state, machine, recipe.train.clip_norm, recipe.seed)
    code = session.train(backend, batches, plan, origin, Opening(lines, changed, prepared.tokenizer, facts))
    if code == EXIT_DONE and mesh.world.size == 1 and not session.locked:  # `quern run` goes on, and shows more
        engine = Engine(state.model.eval(), prepared.tokenizer, machine)
        session.log(f"the model continues texts, from {GOES_ON} on:")
        for pair in continuations(engine, recipe, prepared.val, SHOWN):
            for line in continued(*pair):
                session.log(line)
    return code


class Fitted(NamedTuple):
    """The recipe, the text and the model to train, with nothing left open."""

    recipe: Resolved
    prepared: Prepared
    model: LanguageModel  # with its first weights
    facts: dict[str, Any]  # facts on the model, for run.json
    memory: tuple[float, float] | None  # as `memory_check` returns it
    own: bool  # whether the text is one's own, in a run that begins with no other model


def _fit(asked: Recipe, session: Session, began: Origin | None, check: Check) -> Fitted:
    """Fills in what the user left open, prepares the text and builds the model. The recipe is resolved before its text
    is prepared, and again where more is fitted: a size to the text of one's own, the steps to the minutes."""
    machine, mesh, log, start = session.machine, session.mesh, session.log, session.start
    megabytes = None if began or start else own_megabytes(asked, session.run_dir.out)
    if megabytes is not None:
        asked = fit_time(asked, session, megabytes)
    recipe = resolve(asked, mesh.dp)
    if start is not None:
        _refuse_other_model(recipe, start)
    name = None if began else asked.text.tokenizer
    known = start.tokenizer if start else named_tokenizer(name, None, silent)
    checked = with_vocabulary(asked, known)
    memory = memory_check(checked, machine, mesh, log)
    prepared = session.text(recipe, began, session.encoders)

    def in_text(asked: Recipe) -> Resolved:
        return fit_to_text(with_shards(asked, prepared.public), prepared.tokenizer, prepared.train, mesh.dp)

    asked = with_vocabulary(asked, prepared.tokenizer)
    if megabytes is not None:
        asked = fit_batch(fit_depth(asked, session, prepared), session, prepared)
    if asked != checked:
        memory = memory_check(asked, machine, mesh, log)
    recipe = in_text(asked)
    check(recipe, prepared.tokenizer)
    model, facts, _ = ready_model(recipe, prepared.tokenizer, machine, mesh, log)
    if recipe.train.minutes is not None:
        asked = _fit_minutes(asked, recipe, session, began, model, prepared.train)
        asked = asked if megabytes is None else fit_readings(asked, session, prepared)
        recipe = in_text(asked)
        model.initialize(recipe.seed)
    return Fitted(recipe, prepared, model, facts, memory, megabytes is not None)


def _refuse_other_model(recipe: Resolved, start: Start) -> None:
    """Raises ValueError if the weights of another run's checkpoint do not fit the recipe's model. Its vocabulary is
    the vocabulary of the other run's tokenizer."""
    vocabulary = {name: getattr(start.recipe.model, name) for name in ("vocab_size", "bos")}
    recipe = replace(recipe, model=replace(recipe.model, **vocabulary))
    try:
        refuse_other_weights(recipe, weights_of(start.tensors))
    except ValueError as error:
        had, has = asdict(start.recipe.model), asdict(recipe.model)
        other = "; ".join(f"model.{name} {had[name]} → {has[name]}" for name in has if had[name] != has[name])
        raise ValueError(
            f"the weights of run '{start.run_dir.run}' do not fit another model ({other or error}): leave the flags "
            "that change its shape out, or leave --from out"
        ) from error


def _plan(recipe: Resolved, session: Session, prepared: Prepared, changed: Sequence[str]) -> loop.TrainingPlan:
    """The settings of the loop. A resumed run repeats the plans of its steps, unless its minutes changed."""
    before_warmdown = round((1 - recipe.train.warmdown_share) * recipe.train.steps)
    evaluator = validation(recipe, prepared.tokenizer, prepared.val, session.machine)
    keep_step = before_warmdown if 0 < before_warmdown < recipe.train.steps else None
    plan = session.plan(recipe, evaluator, keep_step=keep_step)
    if recipe.train.minutes is None:
        return plan
    repeats = session.resume and not any(line.startswith("train.minutes") for line in changed)
    recorded = session.mesh.world.broadcast_object(recorded_plans(session.folder) if repeats else [])
    return replace(plan, budget_seconds=60 * recipe.train.minutes, recorded=recorded)


def _fit_minutes(
    asked: Recipe, recipe: Resolved, session: Session, began: Origin | None, model: LanguageModel, corpus: Corpus
) -> Recipe:
    """Returns `asked` with a first plan of the steps and the batch that fit into its minutes (train/horizon.py). A
    resumed run keeps its first plan. Otherwise a few steps are timed, which changes the model. Unless a batch was asked
    for, it follows from the horizon, and the horizon from the batch and the speed: iterated until they agree."""
    mesh = session.mesh
    assert recipe.train.minutes is not None
    if began is not None:
        plan = {name: began.recipe["train"][name] for name in ("steps", "batch_tokens")}
        return replace(asked, train=replace(asked.train, **plan))
    with waiting("a few steps on trial, which may compile the model", log=session.log):
        micro_seconds, update_seconds = mesh.world.broadcast_object(_time_parts(recipe, session, model, corpus))
    micro_tokens = recipe.micro_batch_rows * recipe.model.context
    steps, batch_tokens = 1, recipe.train.batch_tokens
    for _ in range(8):
        step_seconds = micro_seconds * batch_tokens / (micro_tokens * mesh.dp) + update_seconds
        steps = max(1, int(recipe.train.minutes * 60 / step_seconds))
        if asked.train.batch_tokens is not None:
            break
        batch_tokens = batch_rule(steps * batch_tokens, recipe.model.context, mesh.dp)
    session.log(
        f"{recipe.train.minutes:g} minutes are about {steps:,} steps of {batch_tokens:,} tokens on this machine; "
        "planned again as they are spent"
    )
    return replace(asked, train=replace(asked.train, steps=steps, batch_tokens=batch_tokens))


def _time_parts(recipe: Resolved, session: Session, model: LanguageModel, corpus: Corpus) -> tuple[float, float]:
    """Median seconds of one micro-batch forward and backward, and of one optimizer update."""
    machine, mesh, rows = session.machine, session.mesh, recipe.micro_batch_rows
    state = build_state(recipe, machine, model, mesh)
    batches = make_batches(recipe, corpus, rows * mesh.dp)
    passes, updates = [], []
    for step in range(CALIBRATION_STEPS):
        start = time.perf_counter()
        batch = batches.batch(step, mesh.data.rank, mesh.data.size)
        accumulate(state, send_batch(batch, mesh, machine, rows), machine)
        state.optimizer.grad_norm().item()
        middle = time.perf_counter()
        state.optimizer.step(step, Multipliers())
        machine.synchronize()
        passes.append(middle - start)
        updates.append(time.perf_counter() - middle)
    state.optimizer.close()
    return float(np.median(passes[2:])), float(np.median(updates[2:]))


def overview(fitted: Fitted, plan: loop.TrainingPlan, session: Session) -> list[str]:
    """Describes a run before its first step, and what to expect of a text of one's own."""
    recipe, data, parameters = fitted.recipe, fitted.prepared, fitted.facts["model"]["parameters"]
    tokens, public, total = recipe.train.steps * recipe.train.batch_tokens, data.public, parameters["total"]
    asked_for = recipe.train.minutes and 60 * recipe.train.minutes
    seconds = asked_for or tokens * plan.flops.per_token() / training_speed(session, plan.peak_flops)
    epochs = tokens / max(1, data.train.num_tokens)
    many, lines = float(MANY_EPOCHS), list[str]()
    if fitted.own:
        text_bytes, read_bytes = (count * data.bytes_per_token for count in (data.train.num_tokens, tokens))
        untrained = math.log2(data.tokenizer.vocab_size) / data.bytes_per_token
        many = most_readings(parameters["kaplan"], text_bytes)
        lines = expectation(parameters["kaplan"], text_bytes, read_bytes, untrained)
    room = ""
    if fitted.memory is not None:
        needed, there_is = map(human_size, fitted.memory)
        each = " for each rank" if session.mesh.world.size > 1 else ""
        room = f"; memory: at most {needed} of {there_is}{each}"
    lines += [
        f"model: {total:,} parameters; text: {data.train.num_tokens:,} tokens to train on, "
        f"{data.val.num_tokens:,} to validate on",
        f"length: {tokens:,} tokens, {_digits(epochs)} epochs of the text, {_digits(tokens / total)} tokens "
        "for each parameter",
        f"time: about {duration(seconds)} of steps{room}",
    ]
    if epochs > 1 and public is not None and public.shards < public.available:
        enough = min(public.available, math.ceil(epochs * public.shards))
        lines.append(
            f"the text repeats because {public.shards:,} of the {public.available:,} training files of {recipe.data} "
            f"were fetched: --shards {enough} fetches enough"
        )
    if epochs > many:
        fewer = max(1, int(many * data.train.num_tokens / recipe.train.batch_tokens))
        lines.append(
            f"warning: the text is read {_digits(epochs)} times. After about {many:.2g}, reading it again adds "
            f"little: give more text, or --train.steps {fewer}"
        )
    return lines


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


# A text of one's own: vocabulary, size and time, where the user left them open (estimate/own_text.py) ---------------


def refuse_unfit(recipe: Recipe, out: Path) -> None:
    """Refuses wrong values, and a text that is missing or too short to learn from, without reading it.

    Raises:
        FileNotFoundError: There is no such data.
        ValueError: A value is wrong, the text is too short, or none is named.
    """
    validate.check(recipe)
    megabytes = own_megabytes(recipe, out) if name_of_set(recipe.data) is None else None
    if megabytes is not None and megabytes * 1e6 < LEAST_BYTES:
        raise ValueError(
            f"the text has {megabytes * 1e6:,.0f} bytes: training needs {LEAST_BYTES:,} at least, about "
            "a page, and 1 MB, about two novels, to write sentences of its own"
        )


def fit_time(recipe: Recipe, session: Session, megabytes: float) -> Recipe:
    """The recipe with the vocabulary that fits a text, and with a time, where neither size nor length is asked for."""
    recipe = fit_vocabulary(recipe, megabytes)
    train = recipe.train
    open_length = train.steps is None and train.minutes is None and "train.horizon_ratio" not in session.named
    if open_length and _has_open_depth(recipe, session) and session.mesh.tp == 1:
        recipe = replace(recipe, train=replace(train, minutes=MINUTES))
    return recipe


def training_speed(session: Session, peak_flops: float) -> float:
    """The FLOP/s that training reaches, about, on machines of this speed in matrix products."""
    if session.machine.device.type != "cpu":
        return TYPICAL_MFU * peak_flops
    return 1 / (1 / peak_flops + 1 / (OTHER_WORK * session.machine.threads * session.mesh.world.size))


def fit_depth(recipe: Recipe, session: Session, prepared: Prepared) -> Recipe:
    """The recipe with the depth that learns most from a text in the recipe's time, unless a depth is asked for."""
    minutes = recipe.train.minutes
    if minutes is None or not _has_open_depth(recipe, session):
        return recipe
    speed = training_speed(session, measure_peak_flops(session.machine) * session.mesh.world.size)
    flops = 60 * minutes * session.mesh.world.broadcast_object(speed)
    vocab_size, text_bytes = prepared.tokenizer.vocab_size, prepared.train.num_tokens * prepared.bytes_per_token
    depth = best_depth(recipe, vocab_size, text_bytes, prepared.bytes_per_token, flops)
    session.log(
        f"fitted to {human_size(text_bytes)} of text: a vocabulary of {vocab_size:,}, depth {depth}, {minutes:g} "
        "minutes; --text.vocab-size, --depth and --train.minutes set others"
    )
    return replace(recipe, depth=depth)


def fit_batch(recipe: Recipe, session: Session, prepared: Prepared) -> Recipe:
    """The recipe with the batch of a run that ends before it reads a small text too often, where steps are asked for
    and no batch. The recipe's own batch fits a whole horizon, which may read such a text a hundred times."""
    if recipe.train.steps is None or recipe.train.batch_tokens is not None:
        return recipe
    own, tokens = resolve(recipe, session.mesh.dp), prepared.train.num_tokens
    parameters = parameters_of(recipe, prepared.tokenizer.vocab_size)
    most = most_readings(parameters, tokens * prepared.bytes_per_token) * tokens
    batch_tokens = batch_rule(most, own.model.context, session.mesh.dp)
    if batch_tokens >= own.train.batch_tokens:
        return recipe
    return replace(recipe, train=replace(recipe.train, batch_tokens=batch_tokens))


def fit_readings(recipe: Recipe, session: Session, prepared: Prepared) -> Recipe:
    """The recipe with fewer steps, where its time was not asked for and reads a small text too often."""
    steps, batch_tokens, tokens = recipe.train.steps, recipe.train.batch_tokens, prepared.train.num_tokens
    assert steps is not None and batch_tokens is not None
    readings = most_readings(parameters_of(recipe, prepared.tokenizer.vocab_size), tokens * prepared.bytes_per_token)
    most = int(readings * tokens)
    if steps * batch_tokens <= most or set(LENGTHS) & set(session.named):
        return recipe
    if "train.batch_tokens" not in session.named:  # it follows from the length
        batch_tokens = batch_rule(most, resolve(recipe).model.context, session.mesh.dp)
    fewer = max(1, most // batch_tokens)
    session.log(
        f"{fewer:,} steps of {batch_tokens:,} tokens instead, which read the text {readings:.2g} times: read more "
        "often, it is learned by heart; more text helps, and --train.minutes asks for another time"
    )
    return replace(recipe, train=replace(recipe.train, minutes=None, steps=fewer, batch_tokens=batch_tokens))


def _has_open_depth(recipe: Recipe, session: Session) -> bool:
    """Whether the depth of a built-in recipe is left open. That of `unet` must be even; a recipe's own file has one."""
    return recipe.name in ("gpt", "llama", "llama_adamw") and "depth" not in session.named and session.source is None
