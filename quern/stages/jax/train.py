"""The JAX twin's stage: it trains a base model on prepared text with grug's loop, and evaluates it.

Records and checkpoints are in out/runs/<run>/grug/, beside those of the other stages.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from quern.constructors import code_path
from quern.grug import checkpoint, train
from quern.grug.evaluate import flops_per_token, measure_peak_flops, validate
from quern.grug.mesh import batch_shards, check_model_axis, check_rows, first_process_first
from quern.grug.state import Grug, JaxTrainState, StepConfig, init_state, step_config
from quern.recipe import Recipe
from quern.recipes import gpt
from quern.records import MakeTracker, StageFolder, git_hash, read_json
from quern.resolve import resolve
from quern.runs.origin import (
    FILE,
    read_origin,
    refuse_other_order,
    refuse_second_tokenizer,
    source_digest,
    with_absolute_paths,
)
from quern.runs.public_data import with_shards
from quern.runs.run_dir import RunDir
from quern.runs.run_lock import run_lock
from quern.runs.saved import changes
from quern.runs.training import fit_to_text, make_batches
from quern.runs.trust import trust
from quern.stages.open_data import data_of_run, make_origin, open_data
from quern.stages.prepare import Prepared, prepare
from quern.stages.session import loss_and_speed
from quern.temporaries import write_whole
from quern.terminal import Meter, counted
from quern.text.tokenizer import Tokenizer
from quern.train.guard import EXIT_DONE
from quern.validate import check_body

STAGE = "grug"
OF_TEXT = ("data", "val", "shards")
"""Fields that a resumed run takes from its saved recipe, unless they are named."""


@dataclass(frozen=True)
class LoadedJax:
    """A run's newest JAX state on a mesh, with the recipe and the tokenizer it was trained with."""

    state: JaxTrainState
    recipe: Recipe
    cfg: StepConfig
    tokenizer: Tokenizer
    counters: train.Counters


def run(
    recipe: Recipe,
    mesh: Mesh,
    run_dir: RunDir,
    *,
    dtype: str,
    resume: bool,
    command: str,
    log: Callable[[str], None],
    source: str | None = None,
    trackers: Sequence[MakeTracker] = (),
    named: Collection[str] = (),
) -> int:
    """Trains to the recipe's horizon. Every process of the mesh calls this.

    Args:
        recipe: The `gpt` recipe or one whose `make_model` is a `Grug`, unresolved.
        mesh: The devices.
        run_dir: The run.
        dtype: "float32" or "bfloat16", for weights and activations in a step.
        resume: Continue from the newest good checkpoint.
        command: The command line, for the records.
        log: Called with lines for the user.
        source: The text of the recipe's own file, which is kept with the run.
        trackers: What makes the further destinations of metrics.
        named: Fields that the user named in this command.

    Returns:
        An exit code of `train.guard`.

    Raises:
        ValueError: The run exists and `resume` is false; or its recipe, text or tokenizer differs; or the recipe does
            not fit the mesh. A refusal on process 0 is raised on every process.
    """
    path, first = run_dir.stage(STAGE), jax.process_index() == 0
    recipe, core = resolve(with_absolute_paths(recipe)), core_of(recipe)
    check_model_axis(recipe.model, mesh)
    with ExitStack() as stack:
        with first_process_first():
            if first:
                stack.enter_context(run_lock(run_dir, command))
            if checkpoint.steps(path / "checkpoints") and not resume:
                raise ValueError(
                    f"run '{run_dir.run}' has been trained already: continue with --resume, or name another with --run"
                )
        origin = read_origin(path) if resume else None
        if origin is not None and (path / "recipe.json").exists():  # the run's own text, unless the user names another
            body = read_json(path / "recipe.json", dict[str, Any])
            check_body(body)
            recipe = replace(recipe, **{name: body[name] for name in OF_TEXT if name not in named and name in body})
            recipe = replace(recipe, model=replace(recipe.model, vocab_size=body["model"]["vocab_size"]))
        with first_process_first():  # process 0 prepares the text; the others find it prepared
            if origin is not None:
                prepared = open_data(recipe, run_dir, origin, log, named=bool({*OF_TEXT} & set(named)))
                refuse_other_order(run_dir, origin, prepared.train)
            else:
                prepared = prepare(recipe, run_dir.out, log)
                refuse_second_tokenizer(run_dir, prepared.tokenizer)
        recipe = fit_to_text(with_shards(recipe, prepared.public), prepared.tokenizer, prepared.train)
        check_rows(mesh, recipe.micro_batch_rows)
        changed = changes(recipe, path) if resume else []
        if first and origin is None:
            run_dir.folder.mkdir(parents=True, exist_ok=True)
            prepared.tokenizer.save(run_dir.folder / "tokenizer.json")
        records = path if first else path / f"process-{jax.process_index()}"
        stack.enter_context(jax.set_mesh(mesh))
        folder = stack.enter_context(StageFolder(records, [make(records, recipe.to_json()) for make in trackers]))
        if origin is None:
            origin = make_origin(run_dir, prepared, source)
        elif source is not None:
            origin = replace(origin, source=source_digest(source))
        write_whole(records / FILE, json.dumps(origin.to_json(), indent=2) + "\n")
        folder.write_recipe(recipe.to_json(), source)
        trust(run_dir.out, source_digest(source))
        for line in changed:
            log(line)
        plan = _plan(recipe, prepared, step_config(recipe, dtype, core), mesh)
        _write_facts(records, plan, command)
        return _train(recipe, prepared, plan, path / "checkpoints", folder, resume, log)


def _train(
    recipe: Recipe,
    prepared: Prepared,
    plan: train.JaxTrainingPlan,
    checkpoints: Path,
    folder: StageFolder,
    resume: bool,
    log: Callable[[str], None],
) -> int:
    state, counters = init_state(recipe.seed, plan.cfg), train.Counters()
    if resume and (found := train.resume(checkpoints, state, plan.mesh, log)):
        state, counters = found
        log(f"resumed at step {counters.step:,}")
    tokens, devices = recipe.train.batch_tokens, describe(plan.mesh)
    log(f"training: {counted(plan.steps, 'step')} of {tokens:,} tokens in {plan.cfg.dtype} on {devices}")
    with Meter("training", plan.steps, "steps", silent=jax.process_index() > 0) as meter:
        loader = make_batches(recipe, prepared.train)

        def show(step: int, line: dict[str, Any]) -> None:
            meter.at(step, f"{loss_and_speed(line)}, perplexity {line['perplexity']:,.1f}")

        code, _ = train.train(state, counters, loader, plan, folder, checkpoints, meter.log, show)
    if code == EXIT_DONE:
        log(f"trained on {counters.tokens:,} tokens in {counters.seconds:,.0f} s of steps → {checkpoints.parent}")
    return code


def evaluate(run_dir: RunDir, mesh: Mesh, *, dtype: str, log: Callable[[str], None]) -> dict[str, Any]:
    """Measures bits per byte of the run's newest JAX state and appends them to evaluate.jsonl.

    Args:
        run_dir: The run.
        mesh: The devices.
        dtype: "float32" or "bfloat16".
        log: Called with lines for the user.

    Returns:
        `val_bpb` and `val_loss` (nats per token).
    """
    loaded = load(run_dir, mesh, dtype, log)
    prepared = data_of_run(loaded.recipe, run_dir, lambda line: None, STAGE)
    with jax.set_mesh(mesh):
        rows = _eval_rows(loaded.recipe, mesh)
        score = validate(loaded.state.params, prepared.val, loaded.tokenizer.token_bytes(), rows, mesh, loaded.cfg)
    line = {"stage": STAGE, "step": loaded.counters.step, "task": "validation", "metric": "bpb"}
    if jax.process_index() == 0:
        run_dir.append("evaluate.jsonl", [line | {"value": score["val_bpb"]}])
    nats = score["val_loss"]
    log(
        f"step {loaded.counters.step:,}: {score['val_bpb']:.4f} bits per byte, {nats:.4f} nats per token, "
        f"perplexity {math.exp(nats):,.2f}"
    )
    return score


def load(run_dir: RunDir, mesh: Mesh, dtype: str, log: Callable[[str], None]) -> LoadedJax:
    """Loads the run's newest good JAX state, sharded over the mesh.

    Raises:
        FileNotFoundError: The run has no JAX model.
        ValueError: The model was trained with another tokenizer than the run's.
    """
    tokenizer = run_dir.tokenizer()
    found = checkpoint.latest(run_dir.checkpoints(STAGE), log)
    if found is None:
        raise FileNotFoundError(
            f"run '{run_dir.run}' has no JAX model under {run_dir.out}: make one with `quern grug train`, or bring a "
            "PyTorch one over with `quern grug import`"
        )
    path, manifest = found
    meta = manifest["meta"]
    if meta["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(f"{path} was trained with another tokenizer than {run_dir.folder / 'tokenizer.json'}")
    origin = read_origin(run_dir.stage(STAGE))
    recipe = run_dir.read_recipe(meta["recipe"], STAGE, origin and origin.source)
    cfg = step_config(recipe, dtype, core_of(recipe))
    with jax.set_mesh(mesh):
        state = checkpoint.load(path, jax.eval_shape(lambda: init_state(recipe.seed, cfg)), mesh)
    return LoadedJax(state, recipe, cfg, tokenizer, train.Counters(**meta["counters"]))


def core_of(recipe: Recipe) -> type[Grug]:
    """Returns the functions of a recipe's model: the core's for `gpt`. Raises ValueError for other PyTorch recipes."""
    made = recipe.make_model
    own = isinstance(made, type) and issubclass(made, Grug)
    for field in ("make_rules",) if own else ("make_model", "make_rules"):
        if code_path(getattr(recipe, field)) != code_path(getattr(gpt.RECIPE, field)):
            raise ValueError(
                f"recipe '{recipe.name}' has {field} = {recipe.to_json()[field]}, which is PyTorch's: train it with "
                "`quern pretrain`, or write the idea for the JAX twin (docs/grug.md)"
            )
    return made if isinstance(made, type) and issubclass(made, Grug) else Grug


def checkpoint_meta(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the entries of a checkpoint's meta that name its origin."""
    return {"recipe": recipe.to_json(), "tokenizer": tokenizer.fingerprint, "seed": recipe.seed}


def describe(mesh: Mesh) -> str:
    """Returns the mesh as text, such as "8 x cpu (data 4, model 2)"."""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    return f"{mesh.devices.size} x {kind}" + (f" ({axes})" if axes else "")


def _plan(recipe: Recipe, prepared: Prepared, cfg: StepConfig, mesh: Mesh) -> train.JaxTrainingPlan:
    settings = recipe.train
    assert settings.steps and settings.save_every and settings.eval_every
    token_bytes, eval_rows = prepared.tokenizer.token_bytes(), _eval_rows(recipe, mesh)

    def validation(state: JaxTrainState) -> dict[str, Any]:
        return validate(state.params, prepared.val, token_bytes, eval_rows, mesh, cfg)

    return train.JaxTrainingPlan(
        cfg=cfg,
        mesh=mesh,
        steps=settings.steps,
        schedule=recipe.make_schedule(settings),
        micro_batch_rows=recipe.micro_batch_rows,
        max_skips=settings.max_skips,
        log_every=settings.log_every,
        save_every=settings.save_every,
        keep=settings.keep,
        flops_per_token=flops_per_token(cfg),
        peak_flops=measure_peak_flops(cfg.dtype, mesh),
        evaluators=[(settings.eval_every, validation)],
        meta=checkpoint_meta(recipe, prepared.tokenizer),
    )


def _eval_rows(recipe: Recipe, mesh: Mesh) -> int:
    """Rows of a validation batch: about a micro-batch, and a multiple of its shards."""
    shards = batch_shards(mesh)
    return max(1, recipe.micro_batch_rows // shards) * shards


def _write_facts(path: Path, plan: train.JaxTrainingPlan, command: str) -> None:
    """Writes machine.json: the command, the devices, the versions."""
    body = {
        "command": command,
        "git": git_hash(Path(__file__).parent),
        "devices": describe(plan.mesh),
        "processes": jax.process_count(),
        "mesh": dict(plan.mesh.shape),
        "dtype": plan.cfg.dtype,
        "flops_per_token": plan.flops_per_token,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    write_whole(path / "machine.json", json.dumps(body, indent=2) + "\n")
