"""The saved recipe of a run: what a resumed or continued run starts from.

`--resume` continues with the recipe that the stage saved; fields named in the command change it where that is safe.
`--from` starts a new run with the recipe and a checkpoint of another run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from quern.flags.recipe_flags import Arguments, field_names
from quern.recipe import Made, Recipe, Resolved
from quern.runs.origin import newest_meta, read_origin
from quern.runs.run_dir import BEFORE_WARMDOWN, STAGES, RunDir


def read_saved(run_dir: RunDir, stage: str, callables: dict[str, Callable[..., Any]] | None = None) -> Resolved | None:
    """The recipe that a stage saved, with its code; None if the stage has not begun. Raises as `RunDir.read_recipe`."""
    origin = read_origin(run_dir.stage(stage))
    return None if origin is None else run_dir.read_recipe(origin.recipe, stage, origin.source, callables)


def find_saved(verb: str, arguments: Arguments, recipe: Recipe, source: str | None) -> tuple[Recipe, str | None] | None:
    """Finds the saved recipe that a command continues with.

    Args:
        recipe: The recipe for a new run; source: the text of its file, if it has one.

    Returns:
        The saved recipe, prepared for the fields that the flags name, and the source of its file. None if the command
        begins a new run, or names another version of the recipe's file, which the stage compares.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: There is no stage to continue, or the saved recipe cannot be read.
    """
    if verb not in (*STAGES, "run"):
        return None
    begins_with = arguments.value("from") if verb != "run" else None
    resume, chosen, fields = "--resume" in arguments, bool(arguments.recipes), set(arguments.given)
    own = RunDir(Path(arguments.value("out") or "out"), arguments.value("run") or "first")
    stage = verb if verb in STAGES else "pretrain"
    if resume and own.has_trained(stage):
        begins_with = None  # the new run has already begun
    run_dir = RunDir(own.out, begins_with) if begins_with else own
    if verb in ("sft", "rl") and (begins_with or not resume):
        return None  # the stage reads the recipe of the model that it begins with (stages/sft.py, stages/rl.py)
    if not (resume or begins_with or (verb == "run" and run_dir.has_trained(stage))):
        return None
    body = read_saved(run_dir, stage, recipe.callables() if chosen and source else None)
    if body is None:
        if (chosen or fields & set(field_names(recipe))) and not begins_with:
            return None  # the stage never began, and the command says what to train
        if not run_dir.folder.exists():
            raise FileNotFoundError(run_dir.has_no("model"))
        others = [f"`quern {name} --resume {run_dir.flags}`" for name in STAGES if run_dir.has_trained(name)]
        if verb in ("sft", "rl") and others:
            return None  # killed before it wrote its recipe: a supervisor repeats the command
        instead = f"it has {' and '.join(others)}" if others else "name what to train, or another run"
        raise ValueError(f"run '{run_dir.run}' has no stage {stage} to continue with: {instead}")
    code = run_dir.kept_source(stage, source)
    if chosen and (source != code or (source is None and recipe.name != body.name)):
        return None
    if not begins_with:
        return to_resume(body, fields), code
    if plans := newest_meta(run_dir.stage(stage)).get("state", {}).get("plans"):
        body = replace(body, train=replace(body.train, steps=plans[-1][1]))
    return to_continue(body, fields, arguments.value("from_step") == BEFORE_WARMDOWN), code


def to_resume(saved: Made, named: Collection[str]) -> Made:
    """The saved recipe without the fields that contradict those named in the command."""
    if "train.steps" in named:
        saved = replace(saved, train=replace(saved.train, minutes=None))
    if "sft.epochs" in named:
        saved = replace(saved, sft=replace(saved.sft, steps=None))
    return saved


def overlay(saved: Made, given: Recipe, named: Collection[str]) -> Made:
    """The saved recipe with the values of `given` for the fields named in the command."""
    saved = to_resume(saved, named)
    for name in named:
        part, _, field = name.rpartition(".")
        body, values = (getattr(saved, part, None), getattr(given, part, None)) if part else (saved, given)
        if hasattr(body, field):
            body = replace(body, **{field: getattr(values, field)})  # type: ignore[type-var]
            saved = replace(saved, **{part: body}) if part else body
    return saved


def to_continue(saved: Resolved, named: Collection[str], at_peak: bool = False) -> Recipe:
    """The recipe for a new run that continues a finished one.

    Length, batch and learning rates are those of the finished run; the order of the documents is new. Fields that
    depend on a named field are derived again. at_peak: the checkpoint is from before the rates fell, so no warm-up is
    needed.
    """
    length = {"train.steps", "train.minutes", "train.horizon_ratio", "train.batch_tokens"} & set(named)
    train = replace(saved.train, minutes=None, eval_every=None, save_every=None)
    train = replace(train, warmup_steps=0 if at_peak else None)
    if length - {"train.batch_tokens"}:
        train = replace(train, steps=None)
    optim = saved.optim
    if "train.batch_tokens" in named:
        train = replace(train, micro_batch_tokens=None)
        optim = replace(optim, lr_scale=None)
    if length:
        optim = replace(optim, decay_scale=None)
    if length or {"data", "shards"} & set(named):
        optim = replace(optim, table_decay_scale=None)
    val = None if "data" in named else saved.val  # the saved validation files belong to another text
    shards = None if "data" in named or length else saved.shards
    return replace(saved, train=train, optim=optim, val=val, shards=shards, data_seed=saved.data_seed + 1)
