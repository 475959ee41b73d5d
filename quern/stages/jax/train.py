"""The JAX twin's stage: prepared text → a base model, through grug's loop; and its evaluation.

Its records and checkpoints lie beside the other stages', in out/runs/<run>/grug/.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from quern.grug import checkpoint, train
from quern.grug.evaluate import flops_per_token, measure_peak_flops, validate
from quern.grug.mesh import batch_shards, check_fits, wait_for_all
from quern.grug.state import JaxTrainState, StepConfig, init_state, step_config
from quern.recipe import Recipe
from quern.records import StageFolder, git_hash
from quern.resolve import resolve
from quern.runs.origin import FILE, Origin, read_origin, refuse_second_tokenizer, with_absolute_paths
from quern.runs.run_dir import RunDir
from quern.runs.run_lock import run_lock
from quern.runs.saved import changes
from quern.stages.open_data import data_of_run, make_origin, open_data
from quern.stages.prepare import Prepared, prepare
from quern.stages.pretrain import fit_vocabulary, make_batches
from quern.temporaries import write_whole
from quern.terminal import Meter
from quern.text.tokenizer import Tokenizer
from quern.train.guard import EXIT_DONE

STAGE = "grug"


@dataclass(frozen=True)
class LoadedJax:
    """A run's newest state on the mesh, and what it was trained with."""

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
    trackers: tuple = (),
    named: Collection[str] = (),
) -> int:
    """Trains to the recipe's horizon; returns an exit code. recipe: unresolved, of `quern.grug.recipe`.

    Raises ValueError when the run exists and `resume` was not asked for, or was trained with another recipe, or when
    the recipe does not fit the mesh.
    """
    path = run_dir.stage(STAGE)
    if checkpoint.steps(path / "checkpoints") and not resume:
        raise ValueError(
            f"run '{run_dir.run}' has been trained already: go on with --resume, or name another with --run"
        )
    if recipe.train.minutes is not None:
        raise ValueError("the JAX twin trains for steps, not for minutes: give --train.steps")
    if recipe.train.fp8 != "off":
        raise ValueError("the JAX twin has no FP8: leave --train.fp8 out")
    first = jax.process_index() == 0
    with run_lock(run_dir, command) if first else nullcontext():
        common: dict[str, Any] = {
            "named": named,
            "resume": resume,
            "command": command,
            "log": log,
            "trackers": trackers,
        }
        return _run(resolve(with_absolute_paths(recipe)), mesh, run_dir, dtype=dtype, **common)


def _run(
    recipe: Recipe,
    mesh: Mesh,
    run_dir: RunDir,
    *,
    dtype: str,
    resume: bool,
    command: str,
    log: Callable[[str], None],
    trackers: tuple,
    named: Collection[str],
) -> int:
    path, first = run_dir.stage(STAGE), jax.process_index() == 0
    origin = read_origin(path) if resume else None
    if origin is not None and (path / "recipe.json").exists():  # the text is the run's own unless it is named
        body = json.loads((path / "recipe.json").read_text(encoding="utf-8"))
        recipe = replace(recipe, **{name: body[name] for name in ("data", "val") if name not in named})
    prepared = _prepare(recipe, run_dir, origin, log, bool({"data", "val"} & set(named)))
    recipe = fit_vocabulary(recipe, prepared)
    rows = recipe.micro_batch_rows
    check_fits(recipe.model, mesh, rows)
    changed = changes(recipe, path) if resume else []
    if first and origin is None:
        run_dir.folder.mkdir(parents=True, exist_ok=True)
        prepared.tokenizer.save(run_dir.folder / "tokenizer.json")
    cfg = step_config(recipe, dtype)
    flops = flops_per_token(recipe.model, mesh)
    records = path if first else path / f"process-{jax.process_index()}"
    with jax.set_mesh(mesh), StageFolder(records, trackers) as folder:
        if origin is None:
            write_whole(records / FILE, json.dumps(make_origin(run_dir, prepared, None).to_json(), indent=2) + "\n")
        folder.write_recipe(recipe.to_json(), None)
        for line in changed:
            log(line)
        _write_facts(folder.path, mesh, dtype, command, flops)
        state, counters = init_state(recipe.seed, cfg), train.Counters()
        if resume and (found := train.resume(path / "checkpoints", state, mesh, log)):
            state, counters = found
            log(f"resumed at step {counters.step:,}")
        plan = _plan(recipe, prepared, cfg, mesh, rows, flops)
        log(f"training: {plan.steps:,} steps of {recipe.train.batch_tokens:,} tokens in {dtype} on {describe(mesh)}")
        with Meter("training", plan.steps, "steps", silent=not first) as meter:
            loader = make_batches(recipe, prepared.train)
            code, _ = train.train(state, counters, loader, plan, folder, path / "checkpoints", meter.log, _shown(meter))
    if code == EXIT_DONE:
        log(f"trained on {counters.tokens:,} tokens in {counters.seconds:,.0f} s of steps → {path}")
    return code


def evaluate(run_dir: RunDir, mesh: Mesh, *, dtype: str, log: Callable[[str], None]) -> dict[str, Any]:
    """Bits per byte of the run's newest state; appends to evaluate.jsonl."""
    loaded = load(run_dir, mesh, dtype, log)
    prepared = data_of_run(loaded.recipe, run_dir, lambda line: None, STAGE)
    with jax.set_mesh(mesh):
        rows = _eval_rows(loaded.recipe, mesh)
        score = validate(loaded.state.params, prepared.val, loaded.tokenizer.token_bytes(), rows, mesh, loaded.cfg)
    line = {"stage": STAGE, "step": loaded.counters.step, "task": "validation", "metric": "bpb"}
    run_dir.append("evaluate.jsonl", [line | {"value": score["val_bpb"]}])
    log(f"step {loaded.counters.step:,}: {score['val_bpb']:.4f} bits per byte, {score['val_loss']:.4f} nats per token")
    return score


def load(run_dir: RunDir, mesh: Mesh, dtype: str, log: Callable[[str], None]) -> LoadedJax:
    """The run's newest good state, cut for the mesh. Raises FileNotFoundError saying what to run first."""
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
    recipe = Recipe.from_json(meta["recipe"])
    cfg = step_config(recipe, dtype)
    with jax.set_mesh(mesh):
        state = checkpoint.load(path, jax.eval_shape(lambda: init_state(recipe.seed, cfg)), mesh)
    return LoadedJax(state, recipe, cfg, tokenizer, train.Counters(**meta["counters"]))


def checkpoint_meta(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """What every checkpoint says of its origin."""
    return {"recipe": recipe.to_json(), "tokenizer": tokenizer.fingerprint, "seed": recipe.seed}


def describe(mesh: Mesh) -> str:
    """Such as "8 x cpu (data 4, model 2)"."""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    kind = mesh.devices.flat[0].device_kind
    return f"{mesh.devices.size} x {kind}" + (f" ({axes})" if axes else "")


def _plan(
    recipe: Recipe, prepared: Prepared, cfg: StepConfig, mesh: Mesh, rows: int, flops: int
) -> train.JaxTrainingPlan:
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
        micro_batch_rows=rows,
        max_skips=settings.max_skips,
        log_every=settings.log_every,
        save_every=settings.save_every,
        keep=settings.keep,
        flops_per_token=flops,
        peak_flops=measure_peak_flops(cfg.dtype, mesh),
        evaluators=[(settings.eval_every, validation)],
        meta=checkpoint_meta(recipe, prepared.tokenizer),
    )


def _prepare(
    recipe: Recipe, run_dir: RunDir, origin: Origin | None, log: Callable[[str], None], named: bool
) -> Prepared:
    """Text is prepared by process 0 alone; the others wait, then find it done."""
    if jax.process_index() > 0:
        wait_for_all("prepared")
    if origin is not None:
        prepared = open_data(recipe, run_dir, origin, log, named=named)
    else:
        prepared = prepare(recipe, run_dir.out, log)
        refuse_second_tokenizer(run_dir, prepared.tokenizer)
    if jax.process_index() == 0:
        wait_for_all("prepared")
    return prepared


def _eval_rows(recipe: Recipe, mesh: Mesh) -> int:
    """Rows of a batch of windows: about a micro-batch, a multiple of the parts it is cut in."""
    cuts = batch_shards(mesh)
    return max(1, recipe.micro_batch_rows // cuts) * cuts


def _shown(meter: Meter) -> Callable[[int, dict[str, Any]], None]:
    def advance(step: int, line: dict[str, Any]) -> None:
        speed = f", {line['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in line else ""
        meter.at(step, f"loss {round(line['loss'], 3) + 0.0:.3f}{speed}")  # + 0.0: no -0.000

    return advance


def _write_facts(path: Path, mesh: Mesh, dtype: str, command: str, flops: int) -> None:
    """machine.json: how the stage was started, on what."""
    body = {
        "command": command,
        "git": git_hash(Path(__file__).parent),
        "devices": describe(mesh),
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        "dtype": dtype,
        "flops_per_token": flops,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    (path / "machine.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
