"""The saved recipe of a run: what a resumed or continued run starts from, and which fields may change.

`--resume` continues with the recipe that the stage saved; fields named in the command change it where that is safe.
`--from` starts a new run with the recipe and a checkpoint of another run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from quern.flags.recipe_flags import field_names, named, value_of
from quern.recipe import OPERATIONAL, Recipe
from quern.records import Natural, read_json, typed
from quern.runs.origin import Origin, newest_meta, read_origin
from quern.runs.run_dir import STAGES, RunDir
from quern.train import manifest
from quern.train.manifest import CheckpointError
from quern.validate import flag

if TYPE_CHECKING:
    import torch

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
    "rl.steps",
    "rl.lr_share",
    "rl.warmdown_share",
}
"""Fields that may change when a run is resumed, besides every field of `optim`."""
BY_CONTENT = ("data", "val", "shards", "conversations", "text.tokenizer", "sft.tests")
"""Fields that are not compared here: origin.py compares the contents of the files that they name."""
NEWEST, BEFORE_WARMDOWN = "newest", "before-warmdown"


def read_saved(run_dir: RunDir, stage: str, callables: dict[str, Callable[..., Any]] | None = None) -> Recipe | None:
    """Reads recipe.json of a stage, or its copy in the newest checkpoint if the file is missing.

    Returns:
        The recipe with its code; None if the stage has not begun.

    Raises:
        ValueError: recipe.json is damaged, or the recipe's code is missing.
    """
    path = run_dir.stage(stage) / "recipe.json"
    run_dir.refuse_damaged_recipes()
    body = read_json(path, dict[str, Any]) if path.exists() else newest_meta(path.parent).get("recipe")
    if body is None:
        return None
    origin = read_origin(path.parent)
    return run_dir.read_recipe(body, stage, origin and origin.source, callables)


def changes(recipe: Recipe, folder: Path, besides: Sequence[str] = ()) -> list[str]:
    """Compares a recipe with the one that the stage in `folder` saved.

    Args:
        recipe: The recipe to continue with, resolved.
        folder: The stage's folder.
        besides: Parts and fields to ignore.

    Returns:
        One line "field old → new" for each changed field.

    Raises:
        ValueError: A field changed that must not change; the message holds the old and new values.
    """
    path = folder / "recipe.json"
    if not path.exists():
        return []
    old, new = _flat(read_json(path, dict[str, Any])), _flat(recipe.to_json())
    prefixes = tuple(f"{name}." for name in (*besides, *BY_CONTENT))
    known = old.keys() & new.keys()  # ignores fields that an older version did not save
    names = sorted(name for name in known if old[name] != new[name] and not f"{name}.".startswith(prefixes))
    lines = {name: f"{flag(name)} {_shown(old[name])} → {_shown(new[name])}" for name in names}
    refused = [line for name, line in lines.items() if not _changeable(name, old[name], new[name])]
    if refused:
        raise ValueError(
            f"cannot resume {folder}: {'; '.join(refused)} would make it another run. Leave that out, or start another "
            "run with --run; the rates (optim), train.steps and what only says how training goes may change"
        )
    return list(lines.values())


def _changeable(name: str, old: Any, new: Any) -> bool:
    """A run that trains for minutes may get other minutes, or steps; one that trains for steps gets no minutes."""
    of_minutes = name == "train.minutes" and (old is not None or new is None)
    return name in CHANGEABLE or name.startswith("optim.") or of_minutes


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
    """Finds the saved recipe that a command continues with.

    Args:
        verb: The command.
        arguments: Its flags.
        recipe: The recipe for a new run.
        source: The text of that recipe's file, if it has one.
        chosen: Whether the user named that recipe.

    Returns:
        The saved recipe, prepared for the fields that the flags name, and the source of its file. None if the command
        begins a new run, or names another version of the recipe's file, which the stage compares.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: There is no stage to continue, or the saved recipe cannot be read.
    """
    begins_with = value_of(arguments, "from") if verb != "run" else None
    resume = "--resume" in arguments
    own = RunDir(Path(value_of(arguments, "out") or "out"), value_of(arguments, "run") or "first")
    stage = verb if verb in STAGES else "pretrain"
    if resume and own.has_trained(stage):
        begins_with = None  # the new run has already begun
    run_dir = RunDir(own.out, begins_with) if begins_with else own
    if verb not in (*STAGES, "run"):
        return None
    run_dir.refuse_damaged_recipes()
    if verb in ("sft", "rl") and (begins_with or not resume):
        return None  # the stage reads the recipe of the model that it begins with (stages/sft.py, stages/rl.py)
    if not (resume or begins_with or (verb == "run" and run_dir.has_trained(stage))):
        return None
    body = read_saved(run_dir, stage, recipe.callables() if chosen and source else None)
    fields = set(named(arguments))
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
    return to_continue(body, fields, value_of(arguments, "from-step") == BEFORE_WARMDOWN), code


def to_resume(saved: Recipe, named: Collection[str]) -> Recipe:
    """The saved recipe without the fields that contradict those named in the command."""
    if "train.steps" in named:
        saved = replace(saved, train=replace(saved.train, minutes=None))
    if "sft.epochs" in named:
        saved = replace(saved, sft=replace(saved.sft, steps=None))
    return saved


def overlay(saved: Recipe, given: Recipe, named: Collection[str]) -> Recipe:
    """The saved recipe with the values of `given` for the fields named in the command."""
    saved = to_resume(saved, named)
    for name in named:
        part, _, field = name.rpartition(".")
        body, values = (getattr(saved, part, None), getattr(given, part, None)) if part else (saved, given)
        if hasattr(body, field):
            body = replace(body, **{field: getattr(values, field)})  # type: ignore[type-var]
            saved = replace(saved, **{part: body}) if part else body
    return saved


def to_continue(saved: Recipe, named: Collection[str], at_peak: bool = False) -> Recipe:
    """The recipe for a new run that continues a finished one.

    Length, batch and learning rates are those of the finished run; the order of the documents is new. Fields that
    depend on a named field are derived again.

    Args:
        saved: The finished run's recipe, resolved.
        named: The fields named in the command.
        at_peak: Whether the checkpoint was saved at the peak learning rate, so that no warm-up is needed.
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
    if length or {"data", "shards"} & set(named):
        optim = replace(optim, table_decay_scale=None)
    val = None if "data" in named else saved.val  # the saved validation files belong to another text
    shards = None if "data" in named or length else saved.shards
    return replace(saved, train=train, optim=optim, val=val, shards=shards, data_seed=saved.data_seed + 1)


class StateFacts(TypedDict):
    step: Natural
    tokens: NotRequired[Natural]


class Meta(TypedDict):
    """Facts that every checkpoint of a run has beside its tensors."""

    recipe: dict[str, Any]
    tokenizer: str
    state: StateFacts


@dataclass(frozen=True)
class Start:
    """A loaded checkpoint. tensors: the fp32 masters and moments, unsharded."""

    run_dir: RunDir
    stage: str
    recipe: Recipe
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    origin: Origin

    @property
    def base(self) -> dict[str, Any]:
        """The origin of the initial weights, for origin.json."""
        state = self.meta["state"]
        before = (self.origin.base or {}).get("tokens", 0) if self.stage == "pretrain" else 0
        return {
            "run": self.run_dir.run,
            "stage": self.stage,
            "step": state["step"],
            "tokens": state["tokens"] + before,
        }

    def facts(self) -> dict[str, Any]:
        """The text and tokenizer of run.json, for a run that prepares no text itself."""
        known = self.run_dir.facts()
        return {name: known[name] for name in ("data", "tokenizer", "packing") if name in known}


def read_start(
    run_dir: RunDir,
    stages: Sequence[str],
    at: str,
    log: Callable[[str], None],
    callables: dict[str, Callable[..., Any]] | None = None,
) -> Start:
    """Loads the checkpoint that another run or stage starts from.

    Args:
        run_dir: The run of the checkpoint.
        stages: The stages to search; the first one with checkpoints is used.
        at: NEWEST, BEFORE_WARMDOWN (kept from before the learning rates fell), or a step.
        log: Called with lines for the user.
        callables: The recipe's code, if the user named its file.

    Raises:
        FileNotFoundError: There is no such run, or no checkpoint.
        CheckpointError: The checkpoint is damaged.
        ValueError: `at` names no checkpoint.
    """
    stage = next((name for name in stages if run_dir.has_trained(name)), None)
    if stage is None:
        what, verb = ("base model", "pretrain") if "pretrain" in stages else (f"stage '{stages[0]}'", stages[0])
        raise FileNotFoundError(run_dir.has_no(what, verb))
    return open_checkpoint(run_dir, stage, _pick(run_dir, stage, at, log), callables)


def open_checkpoint(
    run_dir: RunDir, stage: str, path: Path, callables: Mapping[str, Callable[..., Any]] | None = None
) -> Start:
    """Loads a checkpoint with its recipe and origin. Raises as `checkpoint.load` and `RunDir.read_recipe`."""
    from quern.train import checkpoint

    tensors, meta = checkpoint.load(path)
    try:
        typed(meta, Meta)
    except ValueError as error:
        raise CheckpointError(f"the manifest of {path} is damaged ({error}): remove this checkpoint") from error
    origin = read_origin(run_dir.stage(stage)) or Origin(meta["tokenizer"])
    recipe = run_dir.read_recipe(meta["recipe"], stage, origin.source, callables)
    return Start(run_dir, stage, recipe, tensors, meta, origin)


def _pick(run_dir: RunDir, stage: str, at: str, log: Callable[[str], None]) -> Path:
    folder = run_dir.checkpoints(stage)
    if at == NEWEST:
        found = manifest.latest(folder, log)
        if found is None:
            raise CheckpointError(run_dir.no_good_checkpoint(stage))
        return found[0]
    steps = manifest.steps(folder)
    if at == BEFORE_WARMDOWN:
        step = max(manifest.kept_steps(folder), default=None)
    else:
        step = int(at) if at.isdigit() else None
    if step not in steps:
        raise ValueError(
            f"--from-step {at}: run '{run_dir.run}' has no such checkpoint; there are {NEWEST} and the steps "
            f"{', '.join(map(str, steps))}"
        )
    return manifest.path_of(folder, step)


def warmdown_start(steps: int | None, share: float) -> int | None:
    """The step at which the learning rates begin to fall; None if no step between the first and the last is."""
    step = round((1 - share) * (steps or 0))
    return step if 0 < step < (steps or 0) else None
