"""A run's saved recipe: what a resumed or continued run starts from, and which of its fields may change.

`--resume` goes on with the recipe that the stage saved; fields that the command names change it, where that is safe.
`--from` takes the recipe of another run for a new one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quern.flags.recipe_flags import field_names, named, value_of
from quern.recipe import OPERATIONAL, Recipe
from quern.runs.origin import Origin, newest_meta, read_origin
from quern.runs.run_dir import STAGES, RunDir
from quern.train import checkpoint
from quern.train.manifest import CheckpointError
from quern.validate import flag

CHANGEABLE = OPERATIONAL | {
    "train.steps",
    "train.warmup_steps",
    "train.warmdown_share",
    "train.final_lr",
    "train.clip_norm",
    "sft.steps",
    "sft.epochs",
    "sft.lr_share",
    "sft.warmdown_share",
}
"""Fields that may change when a run is resumed, with every field of `optim`: they leave what was learned as it is."""
BY_CONTENT = ("data", "val", "conversations", "text.tokenizer")
"""Fields that are not compared here: what they name is, by its content (origin.py)."""
NEWEST, BEFORE_WARMDOWN = "newest", "before-warmdown"


def read_saved(run_dir: RunDir, stage: str, callables: dict[str, Callable[..., Any]] | None = None) -> Recipe | None:
    """The recipe that a stage saved, with its code; None where the stage has not begun.

    Where recipe.json is missing, the newest checkpoint has it too.

    Raises:
        ValueError: recipe.json is damaged, or the code of a recipe of its own is not there.
    """
    path = run_dir.stage(stage) / "recipe.json"
    run_dir.refuse_damaged_recipes()
    body = json.loads(path.read_text(encoding="utf-8")) if path.exists() else newest_meta(path.parent).get("recipe")
    if body is None:
        return None
    origin = read_origin(path.parent)
    return run_dir.read_recipe(body, stage, origin and origin.source, callables)


def changes(recipe: Recipe, folder: Path, besides: Sequence[str] = ()) -> list[str]:
    """Compares a recipe with the one that the stage in `folder` saved.

    Args:
        recipe: The recipe to go on with, resolved.
        folder: The stage's folder.
        besides: Parts and fields that do not matter here.

    Returns:
        One line "field old → new" for each field that differs and may.

    Raises:
        ValueError: A field differs that may not; the message holds old and new values.
    """
    path = folder / "recipe.json"
    if not path.exists():
        return []
    old, new = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(recipe.to_json())
    prefixes = tuple(f"{name}." for name in (*besides, *BY_CONTENT))
    known = old.keys() & new.keys()  # not fields that came later
    names = sorted(name for name in known if old[name] != new[name] and not f"{name}.".startswith(prefixes))
    lines = {name: f"{flag(name)} {_shown(old[name])} → {_shown(new[name])}" for name in names}
    refused = [line for name, line in lines.items() if not _changeable(name, new[name])]
    if refused:
        raise ValueError(
            f"cannot resume {folder}: {'; '.join(refused)} would make it another run. Leave that out, or start another "
            "run with --run; the rates (optim), train.steps and what only says how training goes may change"
        )
    return list(lines.values())


def _changeable(name: str, new: Any) -> bool:
    return name in CHANGEABLE or name.startswith("optim.") or (name == "train.minutes" and new is None)


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _flat(body: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in body.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def find_saved(
    verb: str, arguments: Sequence[str], recipe: Recipe, source: str | None, chosen: bool
) -> tuple[Recipe, str | None] | None:
    """Finds the recipe that a command goes on with.

    Args:
        verb: The command.
        arguments: Its flags.
        recipe: The recipe that the command would begin with.
        source: The text of its file, if it came from one.
        chosen: Whether the user named that recipe.

    Returns:
        The saved recipe, with room for what the flags name, and the source of its own file. None where the command
        begins a run, or goes on with another version of the run's file, which the stage then compares.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: There is nothing to go on with, or the saved recipe cannot be read.
    """
    begins_with = value_of(arguments, "from") if verb != "run" else None
    resume = "--resume" in arguments
    own = RunDir(Path(value_of(arguments, "out") or "out"), value_of(arguments, "run") or "first")
    if resume and own.has_trained("sft" if verb == "sft" else "pretrain"):
        begins_with = None  # it has begun already
    run_dir = RunDir(own.out, begins_with) if begins_with else own
    stage = "sft" if verb == "sft" else "pretrain"
    if verb not in ("pretrain", "sft", "run"):
        return None
    run_dir.refuse_damaged_recipes()
    if verb == "sft" and not resume:
        return None  # of fine-tuning, the base model's recipe decides the rest (stages/sft.py)
    if not (resume or begins_with or (verb == "run" and run_dir.has_trained(stage))):
        return None
    body = read_saved(run_dir, stage, recipe.callables() if chosen and source else None)
    fields = set(named(arguments))
    if body is None:
        if (chosen or fields & set(field_names(recipe))) and not begins_with:
            return None  # it ended before it had begun the stage, and the command says what to train
        if not run_dir.folder.exists():
            raise FileNotFoundError(f"there is no run '{run_dir.run}' under {run_dir.out}: {run_dir.known()}")
        others = [f"`quern {name} --resume {run_dir.flags}`" for name in STAGES if run_dir.has_trained(name)]
        instead = f"it has {' and '.join(others)}" if others else "name what to train, or another run"
        raise ValueError(f"run '{run_dir.run}' has no stage {stage} to go on with: {instead}")
    kept = run_dir.stage(stage) / "recipe_source.py"
    code = kept.read_text(encoding="utf-8") if kept.exists() else None
    if chosen and (source != code or (source is None and recipe.name != body.name)):
        return None
    if not begins_with:
        return to_resume(body, fields), code
    return to_continue(body, fields, value_of(arguments, "from-step") == BEFORE_WARMDOWN), code


# What the command line starts from ----------------------------------------------------------------------------


def to_resume(saved: Recipe, named: Collection[str]) -> Recipe:
    """The saved recipe with room for the fields that a command names: what contradicts them is unset."""
    if "train.steps" in named:
        saved = replace(saved, train=replace(saved.train, minutes=None))
    if "sft.epochs" in named:
        saved = replace(saved, sft=replace(saved.sft, steps=None))
    return saved


def overlay(saved: Recipe, given: Recipe, named: Collection[str]) -> Recipe:
    """The saved recipe with the values that a command gave for the fields that it names."""
    saved = to_resume(saved, named)
    for name in named:
        part, _, field = name.rpartition(".")
        body, values = (getattr(saved, part, None), getattr(given, part, None)) if part else (saved, given)
        if hasattr(body, field):
            body = replace(body, **{field: getattr(values, field)})  # type: ignore[type-var]
            saved = replace(saved, **{part: body}) if part else body
    return saved


def to_continue(saved: Recipe, named: Collection[str], at_peak: bool = False) -> Recipe:
    """The recipe for a new run that goes on from a finished one.

    Its length, batch and rates are the finished run's, its documents come in another order. What follows from a field
    that the command names is derived again.

    Args:
        saved: The finished run's recipe, resolved.
        named: The fields that the command names.
        at_peak: It goes on from where the rates were at their peak, so they are not warmed up again.
    """
    assert saved.data_seed is not None
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
    val = None if "data" in named else saved.val  # that of another text
    return replace(saved, train=train, optim=optim, val=val, data_seed=saved.data_seed + 1)


# What a new run starts from -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A checkpoint of a run, to begin another run or stage with. tensors: fp32 masters and moments, whole."""

    run_dir: RunDir
    stage: str
    recipe: Recipe
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    origin: Origin

    @property
    def base(self) -> dict[str, Any]:
        """For the record: where the first weights come from."""
        state = self.meta["state"]
        before = (self.origin.base or {}).get("tokens", 0) if self.stage == "pretrain" else 0
        return {
            "run": self.run_dir.run,
            "stage": self.stage,
            "step": state["step"],
            "tokens": state["tokens"] + before,
        }

    def facts(self) -> dict[str, Any]:
        """What the run's record says of its text and tokenizer, for that of a run without a text of its own."""
        path = self.run_dir.folder / "run.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: known[name] for name in ("data", "tokenizer", "packing") if name in known}


def read_start(
    run_dir: RunDir,
    stages: Sequence[str],
    at: str,
    log: Callable[[str], None],
    callables: dict[str, Callable[..., Any]] | None = None,
) -> Start:
    """Loads the checkpoint that another run or stage begins with.

    Args:
        run_dir: The run that has it.
        stages: Stages to look in; the first that has checkpoints counts.
        at: NEWEST, BEFORE_WARMDOWN (the one that is kept from before the rates fell), or a step.
        log: Takes lines for the user.
        callables: The recipe's code, where the user named its file.

    Raises:
        FileNotFoundError: There is no such run, or no checkpoint.
        CheckpointError: The checkpoint is damaged.
        ValueError: `at` names no checkpoint.
    """
    stage = next((name for name in stages if checkpoint.steps(run_dir.checkpoints(name))), None)
    if stage is None:
        if not run_dir.folder.exists():
            raise FileNotFoundError(f"there is no run '{run_dir.run}' under {run_dir.out}: {run_dir.known()}")
        raise FileNotFoundError(
            f"run '{run_dir.run}' has no base model: make one with `quern pretrain {run_dir.flags}`"
            if "pretrain" in stages
            else f"run '{run_dir.run}' has no {stages[0]} stage to start from"
        )
    path = _pick(run_dir, stage, at, log)
    tensors, meta = checkpoint.load(path)
    origin = read_origin(run_dir.stage(stage)) or Origin(meta["tokenizer"])
    recipe = run_dir.read_recipe(meta["recipe"], stage, origin.source, callables)
    return Start(run_dir, stage, recipe, tensors, meta, origin)


def _pick(run_dir: RunDir, stage: str, at: str, log: Callable[[str], None]) -> Path:
    folder = run_dir.checkpoints(stage)
    if at == NEWEST:
        found = checkpoint.latest(folder, log)
        if found is None:
            raise CheckpointError(run_dir.no_good_checkpoint(stage))
        return found[0]
    steps = checkpoint.steps(folder)
    if at == BEFORE_WARMDOWN:
        step = max(checkpoint.kept_steps(folder), default=None)
    else:
        step = int(at) if at.isdigit() else None
    if step not in steps:
        raise ValueError(
            f"--from-step {at}: run '{run_dir.run}' has no such checkpoint; there are {NEWEST} and the steps "
            f"{', '.join(map(str, steps))}"
        )
    return checkpoint.path_of(folder, step)


def warmdown_start(steps: int | None, share: float) -> int | None:
    """The step at which the rates begin to fall; None where there is no such step between the first and the last."""
    step = round((1 - share) * (steps or 0))
    return step if 0 < step < (steps or 0) else None
