"""Pretraining: prepared text → a base model, through the one loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.batch import Batches
from quern.data.loader import Loader, windows
from quern.data.shards import Corpus
from quern.data.stream_loader import StreamLoader
from quern.eval.bits_per_byte import bits_per_byte
from quern.machine import Machine, measure_peak_flops
from quern.mesh import Mesh, alone
from quern.model.count import flops_per_token
from quern.optim.schedule import Multipliers
from quern.parallel.plan import shard_model
from quern.recipe import FOR_FINE_TUNING, Recipe
from quern.resolve import batch_rule, resolve
from quern.runs.origin import (
    Origin,
    read_origin,
    refuse_second_tokenizer,
    require_same,
    source_digest,
    with_absolute_paths,
)
from quern.runs.run_dir import STAGES, RunDir, refuse_unwritable
from quern.runs.run_lock import run_lock
from quern.runs.saved import Start, changes, warmdown_start
from quern.stages.memory_check import memory_check
from quern.stages.open_data import make_origin, open_data
from quern.stages.overview import overview
from quern.stages.prepare import Prepared, prepare
from quern.stages.session import describe_run, lower_precision, main_first, open_folder, train_with_meter
from quern.train import checkpoint, loop
from quern.train.checkpoint import steps as saved_steps
from quern.train.guard import EXIT_DONE
from quern.train.state import TrainState, build_model, build_state, compile_model
from quern.train.step import accumulate

CALIBRATION_STEPS = 8


def run(
    recipe: Recipe,
    machine: Machine,
    run_dir: RunDir,
    *,
    resume: bool,
    source: str | None,
    command: str,
    log: Callable[[str], None],
    trackers: tuple = (),
    mesh: Mesh | None = None,
    named: Collection[str] = (),
    start: Start | None = None,
    go_on: str | None = None,
    locked: bool = False,
) -> int:
    """Trains to the recipe's horizon. On a mesh every rank calls this.

    Args:
        recipe: What to train; fields that are None follow from depth.
        machine: What computes.
        run_dir: The run.
        resume: Go on from the newest good checkpoint.
        source: The text of the recipe's own file, if it came from one.
        command: The command line, for the record.
        log: Takes lines for the user.
        trackers: Where metrics also go.
        mesh: The ranks; None is this process alone.
        named: Fields that the user named in this command.
        start: The checkpoint of another run that this one begins with; None begins with random weights.
        go_on: The command that goes on after a stop, for messages.
        locked: The caller holds the run's lock.

    Returns:
        An exit code of `train.guard`.

    Raises:
        ValueError: The run exists and `resume` was not asked for; or its recipe, text or tokenizer is another one.
        RunInUseError: Another process trains in the run.
    """
    mesh = mesh or alone()
    if saved_steps(run_dir.checkpoints("pretrain")) and not resume:
        raise ValueError(
            f"run '{run_dir.run}' has been pretrained already: go on with --resume, train on from its model with "
            f"`quern pretrain --from {run_dir.run} --run NAME`, or name another run with --run"
        )
    refuse_unwritable(run_dir.out)
    if start is not None and not resume:
        refuse_trained(run_dir)
    with nullcontext() if locked else run_lock(run_dir, command, mesh):
        common = {"source": source, "log": log, "trackers": trackers, "named": named, "start": start}
        go_on = go_on or f"quern pretrain --resume {run_dir.flags}"
        return _run(recipe, machine, run_dir, mesh, resume=resume, command=command, go_on=go_on, **common)


def _run(
    recipe: Recipe,
    machine: Machine,
    run_dir: RunDir,
    mesh: Mesh,
    *,
    resume: bool,
    source: str | None,
    command: str,
    log: Callable[[str], None],
    trackers: tuple,
    named: Collection[str],
    start: Start | None,
    go_on: str,
) -> int:
    path = run_dir.stage("pretrain")
    needed = memory_check(recipe, machine, mesh, log)
    asked = with_absolute_paths(recipe)
    recipe = resolve(asked)
    origin = read_origin(path) if resume else None
    with main_first(mesh):
        if origin is not None:
            prepared = open_data(recipe, run_dir, origin, log, named=bool({"data", "val"} & set(named)))
        else:
            prepared = prepare(recipe, run_dir.out, log, start and start.run_dir.tokenizer())
            refuse_second_tokenizer(run_dir, prepared.tokenizer)
    recipe = fit_vocabulary(recipe, prepared)
    model = shard_model(build_model(recipe, machine, recipe.seed), mesh)
    precision = lower_precision(recipe, model, log)
    compile_model(model, machine)
    if recipe.train.minutes is not None:
        steps = fit_minutes(recipe, asked, machine, model, prepared.train, path, log, mesh, resume)
        recipe = fit_vocabulary(resolve(replace(asked, train=replace(asked.train, **steps))), prepared)
        model.init_parameters(machine.generator(recipe.seed))
    changed = changes(recipe, path, besides=FOR_FINE_TUNING) if resume else []
    loader = make_loader(recipe, prepared.train)
    state = build_state(recipe, machine, model, mesh)
    base = None if start is None else load_start(state, start, log)
    if origin is None:
        origin = make_origin(run_dir, prepared, source, base)
    elif source is not None:
        origin = replace(origin, source=source_digest(source))
    evaluator = validation(recipe, prepared, machine)
    assert recipe.train.steps and recipe.optim.lr_scale is not None
    schedule = recipe.make_schedule(recipe.train)
    plan = make_plan(recipe, machine, mesh, recipe.train.steps, schedule, evaluator, origin)
    plan = replace(
        plan,
        keep_step=warmdown_start(recipe.train.steps, recipe.train.warmdown_share),
        go_on=go_on,
        lower_rates=f"--optim.lr-scale {recipe.optim.lr_scale / 2:.3g}",
    )
    resumed = resume and loop.resume(state, path / "checkpoints", log, lambda meta, at: require_same(meta, origin, at))
    if state.step > plan.steps:
        raise ValueError(
            f"run '{run_dir.run}' has trained for {state.step:,} steps, so train.steps {plan.steps:,} is behind it: "
            "give more steps, or leave --train.steps out"
        )
    if not resumed and base is None and origin.base is not None:
        raise ValueError(
            f"run '{run_dir.run}' has no checkpoint, not even of what it began with, step {origin.base['step']:,} of "
            f"run '{origin.base['run']}': remove {path}, and begin again with --from {origin.base['run']}"
        )
    if mesh.main and prepared.facts and not resumed:  # a run that goes on has it already
        facts = {**prepared.facts, **precision, "packing": {"method": recipe.train.packing, **loader.report()}}
        describe_run(recipe, machine, run_dir, facts, command)
        prepared.tokenizer.save(run_dir.folder / "tokenizer.json")
    if start is not None and not resumed:  # first of all: what was begun with it never begins with anything else
        save_first(path, state, plan, mesh)
    with open_folder(path, recipe, source, trackers, mesh, origin) as folder:
        if resumed:
            log(f"resumed at step {state.step:,}")
            folder.event("command", command=command, changed=changed)
        for line in [*changed, *overview(recipe, plan, prepared, needed, mesh)]:
            log(line)
        log(f"pretraining: {plan.steps:,} steps of {recipe.train.batch_tokens:,} tokens")
        code = train_with_meter("pretraining", state, loader, plan, machine, folder, mesh)
    if code == EXIT_DONE:
        log(f"pretrained on {state.tokens:,} tokens in {state.seconds:,.0f} s of steps → {path}")
    return code


def save_first(stage: Path, state: TrainState, plan: loop.TrainingPlan, mesh: Mesh) -> None:
    """Saves the weights that a run begins with as its step 0, so that it never needs the other run again."""
    meta = plan.meta | {"state": state.meta(), "kept": False}
    checkpoint.save(stage / "checkpoints", 0, state.slices(), meta, plan.keep, mesh=mesh)


def refuse_trained(run_dir: RunDir) -> None:
    """Raises ValueError where the run has a model already, of any stage: a new one would not belong to it."""
    trained = [name for name in STAGES if run_dir.has_trained(name)]
    if trained:
        raise ValueError(
            f"run '{run_dir.run}' has a model of its own ({', '.join(trained)}): name a new run with --run, to begin "
            "it with the model that --from names"
        )


def load_start(state: TrainState, start: Start, log: Callable[[str], None]) -> dict[str, Any]:
    """Puts the weights, and the optimizer's moments where they fit, of another run's checkpoint into a fresh state.

    Returns:
        Where they come from, for the record.
    """
    base = start.base
    try:
        state.optimizer.load_state_tensors(start.tensors)
        moments = "its optimizer state goes on"
    except ValueError:  # another optimizer: the weights alone, which must fit
        weights = {name: tensor for name, tensor in start.tensors.items() if name.startswith("master.")}
        state.optimizer.load_state_tensors(state.tensors() | weights)
        moments = "the optimizer begins afresh, since it is another one"
    log(f"weights: step {base['step']:,} of {base['stage']} in run '{base['run']}'; {moments}")
    return base


def make_plan(
    recipe: Recipe,
    machine: Machine,
    mesh: Mesh,
    steps: int,
    schedule: Callable[[int], Multipliers],
    evaluator: loop.Evaluator,
    origin: Origin,
) -> loop.TrainingPlan:
    """What the loop is to do, of pretraining and of fine-tuning."""
    train = recipe.train
    assert train.save_every and train.eval_every
    return loop.TrainingPlan(
        steps=steps,
        schedule=schedule,
        micro_batch_rows=recipe.micro_batch_rows,
        clip_norm=train.clip_norm,
        log_every=train.log_every,
        save_every=train.save_every,
        keep=train.keep,
        save_in_background=train.save_in_background,
        flops_per_token=flops_per_token(recipe),
        peak_flops=measure_peak_flops(machine) * mesh.world.size,
        evaluators=[(train.eval_every, evaluator)],
        meta={
            "recipe": recipe.to_json(),
            "tokenizer": origin.tokenizer,
            "seed": recipe.seed,
            "origin": origin.to_json(),
        },
    )


def fit_vocabulary(recipe: Recipe, prepared: Prepared) -> Recipe:
    """The recipe with the tokenizer's BOS and vocabulary, which a small corpus may have kept below what was asked."""
    tokenizer = prepared.tokenizer
    return replace(recipe, model=replace(recipe.model, vocab_size=tokenizer.vocab_size, bos=tokenizer.bos))


def make_loader(recipe: Recipe, corpus: Corpus, rows: int | None = None) -> Batches:
    """The recipe's batches, of `rows` rows instead of its own number where that is given."""
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    assert context and batch_tokens
    rows = rows or max(1, batch_tokens // context)
    seed = recipe.seed if recipe.data_seed is None else recipe.data_seed
    if recipe.train.packing == "stream":
        return StreamLoader(corpus, context, rows, seed)
    return Loader(corpus, context, rows, seed, recipe.train.packing)


def validation(recipe: Recipe, prepared: Prepared, machine: Machine) -> loop.Evaluator:
    """Bits per byte on the fixed validation set, every byte once; the replicas share its batches."""
    token_bytes = prepared.tokenizer.token_bytes()
    context, rows = recipe.model.context, recipe.micro_batch_rows
    assert context

    def evaluate(state: TrainState) -> dict[str, Any]:
        replicas = state.optimizer.mesh.data
        batches = islice(windows(prepared.val, context, rows=rows), replicas.rank, None, replicas.size)
        score = bits_per_byte(state.model, batches, token_bytes, machine, replicas)
        return {"val_bpb": score.bpb, "val_loss": score.nats_per_token}

    return evaluate


def fit_minutes(
    recipe: Recipe,
    asked: Recipe,
    machine: Machine,
    model: Any,
    corpus: Corpus,
    path: Path,
    log: Callable[[str], None],
    mesh: Mesh,
    resume: bool,
) -> dict[str, int]:
    """→ the steps, and tokens in each, that fit into `minutes`: from the time of a few steps, which change the model.

    The batch is the one that was asked for. Else it follows from the horizon, and the horizon from the batch and the
    speed: iterated until they agree. On resume the steps are those in the run's own recipe. recipe: resolved; asked: as
    the user gave it.
    """
    assert recipe.train.minutes is not None
    if mesh.tp > 1:
        raise ValueError("train.minutes cannot be measured with --tp: give train.steps instead")
    written = path / "recipe.json"
    if resume and written.exists():  # also where it died before its first checkpoint
        train = json.loads(written.read_text(encoding="utf-8"))["train"]
        steps, batch_tokens = train["steps"], train["batch_tokens"]
    else:
        measured = _time_parts(recipe, machine, model, corpus, mesh)
        micro_seconds, update_seconds = mesh.world.broadcast_object(measured)
        micro_tokens = recipe.micro_batch_rows * (recipe.model.context or 1)
        steps, batch_tokens = 1, recipe.train.batch_tokens or micro_tokens
        for _ in range(8):
            step_seconds = micro_seconds * batch_tokens / (micro_tokens * mesh.dp) + update_seconds
            steps = max(1, int(recipe.train.minutes * 60 / step_seconds))
            if asked.train.batch_tokens is not None:
                break
            batch_tokens = batch_rule(steps * batch_tokens, recipe.model.context or 1)
        log(f"{recipe.train.minutes:g} minutes are {steps:,} steps of {batch_tokens:,} tokens on this machine")
    return {"steps": steps, "batch_tokens": batch_tokens}


def _time_parts(recipe: Recipe, machine: Machine, model: Any, corpus: Corpus, mesh: Mesh) -> tuple[float, float]:
    """Median seconds of one micro-batch forward and backward, and of one optimizer update."""
    state = build_state(recipe, machine, model, mesh)
    rows = recipe.micro_batch_rows
    loader = make_loader(recipe, corpus, rows * mesh.dp)
    passes, updates = [], []
    for step in range(CALIBRATION_STEPS):
        start = time.perf_counter()
        accumulate(state, loader.batch(step, mesh.data.rank, mesh.data.size), machine, rows)
        state.optimizer.grad_norm().item()
        middle = time.perf_counter()
        state.optimizer.step(step, Multipliers())
        machine.synchronize()
        passes.append(middle - start)
        updates.append(time.perf_counter() - middle)
    state.optimizer.close()
    return float(np.median(passes[2:])), float(np.median(updates[2:]))
