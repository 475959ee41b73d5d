"""The record of what a stage was made from: its inputs by fingerprint, the model that it began with, its recipe.

A stage writes the record when it begins (origin.json, recipe.json, and both into every checkpoint). `--resume` goes on
with the saved recipe; fields named in the command change it where that is safe. A resumed stage is compared with the
record (`compare`): a stage owns its inputs, because training on other data would silently be wrong. `--from` starts a
new run with the recipe and a checkpoint of another run.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quern.data.shards import Corpus
from quern.flags.recipe_file import map_paths
from quern.flags.recipe_flags import Arguments, field_names
from quern.process import environment
from quern.recipe import (
    BUILT_IN_CONVERSATIONS,
    FOR_FINE_TUNING,
    FOR_RL,
    OPERATIONAL,
    Made,
    Recipe,
    Resolved,
    TextRecipe,
)
from quern.records import read_json, typed
from quern.runs.run_dir import BEFORE_WARMDOWN, STAGES, RunDir
from quern.text.tokenizer import Tokenizer
from quern.train import manifest
from quern.train.manifest import CheckpointError, read_manifest
from quern.validate import check_body, flag

FILE = "origin.json"
HASHED_DOCUMENTS = 256
SHOWN = 16
"""Number of digits of a fingerprint in messages."""
COMPARED = {
    "tokenizer": "the tokenizer has",
    "text": "the text has",
    "tokens": "the text has",
    "conversations": "the conversations have",
    "rewards": "the files of --rl.rewards or --rl.data have",
}
CHANGEABLE = (
    OPERATIONAL
    | {f"train.{name}" for name in ("steps", "warmup_steps", "warmdown_share", "final_lr", "clip_norm")}
    | {f"sft.{name}" for name in ("steps", "epochs", "lr_share", "warmdown_share")}
    | {f"rl.{name}" for name in ("steps", "lr_share", "warmdown_share")}
)
"""Fields of the recipe that may change when a stage is resumed, besides every field of `optim`."""
BY_CONTENT = ("data", "val", "shards", "conversations", "text.tokenizer", "sft.tests", "rl.rewards", "rl.data")
"""Fields that name files: the fingerprints of their contents are compared instead."""


@dataclass(frozen=True)
class Origin:
    """Fingerprints (hex) and locations of a stage's inputs; None for an input that the stage does not have."""

    tokenizer: str  # fingerprint of the run's tokenizer
    text: str | None = None  # fingerprint of the tokenized text
    tokens: str | None = None  # fingerprint of the token shards
    shards: str | None = None  # folder of the shards, relative to the output folder
    conversations: str | None = None  # fingerprint of the token ids for fine-tuning
    tests: list[str] | None = None  # the public test sets that these were compared with; None: not recorded
    source: str | None = None  # SHA-256 of the recipe's Python file
    base: dict[str, Any] | None = None
    """The model that provided the initial weights: run (None for the same run), stage, step, tokens."""
    rewards: str | None = None
    """Fingerprint of the files that questions and rewards of reinforcement learning are read from."""
    recipe: dict[str, Any] = field(default_factory=dict)  # the resolved recipe as JSON

    def to_json(self) -> dict[str, Any]:
        """The contents of origin.json: all but the recipe, which has a file of its own."""
        return {name: value for name, value in vars(self).items() if name != "recipe"}

    def meta(self) -> dict[str, Any]:
        """The entries of a checkpoint's meta that say what it was made from."""
        own = {"recipe": self.recipe, "tokenizer": self.tokenizer, "seed": self.recipe["seed"]}
        return own | {"origin": self.to_json()}

    @staticmethod
    def of_checkpoint(meta: dict[str, Any]) -> Origin:
        """The inverse of `meta`, which may lack the entry "origin"."""
        return typed((meta.get("origin") or {}) | {name: meta.get(name) for name in ("tokenizer", "recipe")}, Origin)


def read_origin(stage: Path, recipe: dict[str, Any] | None = None) -> Origin | None:
    """Reads the record of a stage folder; a file that is missing is replaced by its copy in the newest checkpoint.

    recipe: the recipe as JSON; None reads recipe.json. Returns None for a stage that has not begun. Raises ValueError
    for a damaged file.
    """
    origin, path = stage / FILE, stage / "recipe.json"
    if recipe is None and path.exists():
        instead = "put back a copy of it, or remove it; going on with the same flags writes it again"
        recipe = read_json(path, dict[str, Any], instead)
        try:
            check_body(recipe)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): {instead}") from error
    meta = {} if origin.exists() and recipe is not None else newest_meta(stage)
    recipe = recipe or meta.get("recipe")
    if recipe is None or not (origin.exists() or meta):
        return None
    if not origin.exists():
        return Origin.of_checkpoint(meta | {"recipe": recipe})
    found = read_json(origin, Origin, "remove it, the run's checkpoints hold the same facts")
    return replace(found, recipe=recipe)


def newest_meta(stage: Path) -> dict[str, Any]:
    """The metadata of the newest readable checkpoint of a stage; empty if there is none."""
    for step in reversed(manifest.steps(stage / "checkpoints")):
        with suppress(CheckpointError, ValueError):
            return read_manifest(manifest.path_of(stage / "checkpoints", step))["meta"]
    return {}


def compare(began: Origin | None, now: Origin, run_dir: RunDir, stage: str, besides: Sequence[str] = ()) -> list[str]:
    """Compares what a resumed stage is made from (`now`) with what it began with: its inputs, then its recipe.

    began: None for a stage that begins; besides: parts and fields of the recipe to ignore. Returns a line
    "field old → new" for each changed field. Raises ValueError for an input or a field that must not change.
    """
    if began is None:
        return []
    require_same(began, now, run_dir, stage)
    old, new = flat(began.recipe), flat(now.recipe)
    prefixes = tuple(f"{name}." for name in (*besides, *BY_CONTENT))
    known = old.keys() & new.keys()  # ignores fields that an older version did not save
    names = sorted(name for name in known if old[name] != new[name] and not f"{name}.".startswith(prefixes))
    lines = {name: f"{flag(name)} {_shown(old[name])} → {_shown(new[name])}" for name in names}
    may = {name for name in names if name in CHANGEABLE or name.startswith("optim.")}
    if old.get("train.minutes") is not None or new.get("train.minutes") is None:
        may.add("train.minutes")  # a run that trains for minutes may get others, or steps; of steps, no minutes
    refused = [line for name, line in lines.items() if name not in may]
    if refused:
        steps, rates = (f"{stage}.steps", f"{stage}.lr-share") if stage in ("sft", "rl") else ("train.steps", "optim")
        raise ValueError(
            f"cannot resume {run_dir.stage(stage)}: {'; '.join(refused)} would make it another run. Leave that as it "
            f"was, or start another run with --run; the rates ({rates}), {steps} and what only says how training goes "
            "may change"
        )
    return list(lines.values())


def require_same(
    began: Origin, now: Origin, run_dir: RunDir, stage: str, *, what: str = "", instead: str = "put back what it was"
) -> None:
    """Raises ValueError for the first input that both records have and that differs.

    Args:
        what: The name of what began with the first record; empty for the run.
        instead: Advice for an input other than the tokenizer, besides training under another name.
    """
    for name, changed in COMPARED.items():
        before, found = getattr(began, name), getattr(now, name)
        if before == found or before is None or found is None:
            continue
        other = f", or train on from its model with `quern {stage} {run_dir.start_flags}`" if stage in STAGES else ""
        again = f"{instead}{',' if other else ', or'} name a new --run{other}"
        remedy = run_dir.put_back_tokenizer if name == "tokenizer" else again
        marks = f"({str(before)[:SHOWN]}, now {str(found)[:SHOWN]})"
        raise ValueError(f"{changed} changed since {what or f'run {run_dir.run!r}'} began with it {marks}: {remedy}")


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def flat(body: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested objects by their names, such as train.steps."""
    found: dict[str, Any] = {}
    for key, value in body.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return found


def refuse_second_tokenizer(run_dir: RunDir, tokenizer: Tokenizer) -> None:
    """Raises ValueError if any stage of the run was trained with another tokenizer."""
    path = run_dir.folder / "tokenizer.json"
    trained = sorted(path.parent.name for path in run_dir.folder.glob("*/checkpoints") if manifest.steps(path))
    if trained and path.exists() and (known := run_dir.tokenizer().fingerprint) != tokenizer.fingerprint:
        raise ValueError(
            f"run '{run_dir.run}' holds a model ({', '.join(trained)}) of another tokenizer ({known[:SHOWN]}, this "
            f"text gives {tokenizer.fingerprint[:SHOWN]}): name another run with --run"
        )


def source_digest(source: str | None) -> str | None:
    """SHA-256 (hex) of a recipe file's text."""
    return None if source is None else hashlib.sha256(source.encode("utf-8")).hexdigest()


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths, so that it is valid in every working directory."""

    def absolute(name: str) -> str:
        own = name.strip() and name not in BUILT_IN_CONVERSATIONS  # an empty path would be the working directory
        pattern = os.path.join(glob.escape(os.getcwd()), name) if glob.has_magic(name) else name
        return str(Path(name).absolute()) if own and Path(name).exists() else pattern

    return map_paths(recipe, absolute)


def corpus_fingerprint(*corpora: Corpus) -> str:
    """SHA-256 (hex) of documents: lengths, token ids and masks. It reads some documents at a time."""
    digest = hashlib.sha256()
    for corpus in corpora:
        digest.update(corpus.lengths.tobytes())
        for mask in (False, True) if corpus.masked else (False,):
            for at in range(0, corpus.num_documents, HASHED_DOCUMENTS):
                starts, lengths = (values[at : at + HASHED_DOCUMENTS] for values in (corpus.starts, corpus.lengths))
                out = np.empty(int(lengths.sum()), np.bool_ if mask else np.int32)
                corpus.copy(out, np.cumsum(lengths) - lengths, starts, lengths, mask)
                digest.update(out.tobytes())
    return digest.hexdigest()


# The saved recipe: what a resumed or continued run starts from ------------------------------------------------------


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
    if environment().get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # the command of the start, after a rank failed
        resume = resume or read_origin(own.stage(stage)) is not None
    if resume and own.has_trained(stage):
        begins_with = None  # the new run has already begun
    run_dir = RunDir(own.out, begins_with) if begins_with else own
    if verb in ("sft", "rl") and (begins_with or not resume):
        return _asked_before(verb, run_dir, recipe, fields)
    if not (resume or begins_with or (verb == "run" and any(map(run_dir.has_trained, STAGES)))):
        return None
    body = read_saved(run_dir, stage, recipe.callables() if chosen and source else None)
    if body is None:
        tunes = verb in ("sft", "rl")
        if tunes and any(map(own.has_trained, STAGES)):  # killed before it wrote its recipe
            return _asked_before(verb, run_dir, recipe, fields)
        if (chosen or fields & set(field_names(recipe))) and not (begins_with or tunes):
            return None  # the stage never began, and the command says what to train
        if not run_dir.folder.exists():
            raise FileNotFoundError(run_dir.has_no("model"))
        others = [f"`quern {name} --resume {run_dir.flags}`" for name in STAGES if run_dir.has_trained(name)]
        instead = "begin again with --from RUN" if tunes else "name what to train, or another run"
        if others:
            instead = f"it has {' and '.join(others)}"
        raise ValueError(f"run '{run_dir.run}' has no stage {stage} to continue with: {instead}")
    code = run_dir.kept_source(stage, source)
    if chosen and (source != code or (source is None and recipe.name != body.name)):
        return None
    if not begins_with:
        return to_resume(body, fields), code
    if plans := newest_meta(run_dir.stage(stage)).get("state", {}).get("plans"):
        body = replace(body, train=replace(body.train, steps=plans[-1][1]))
    return to_continue(body, fields, arguments.value("from_step") == BEFORE_WARMDOWN), code


def _asked_before(
    verb: str, run_dir: RunDir, recipe: Recipe, named: Collection[str]
) -> tuple[Recipe, str | None] | None:
    """The recipe with the stage's settings, such as conversations, from the recipe of the model it begins with. The
    stage reads the rest, and the code. Fine-tuned models ask for no fine-tuning: their steps followed from theirs."""
    before = {"sft": ("pretrain",), "rl": ("sft", "rl")}[verb]
    body = next((meta["recipe"] for stage in before if (meta := newest_meta(run_dir.stage(stage)))), None)
    if body is None:
        return None
    check_body(body)
    saved = Recipe.from_json({name: value for name, value in body.items() if name[:5] != "make_"} | recipe.callables())
    return to_resume(overlay(recipe, saved, FOR_RL if verb == "rl" else FOR_FINE_TUNING), named), None


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

    Length, batch and learning rates come from the finished run; the order of the documents is new. Fields that depend
    on a named field are derived again. at_peak: the checkpoint is from before the rates fell, so no warm-up is needed.
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
    if "data" in named:  # these choose files of another text
        saved = replace(saved, val=None, include=None, exclude=None)
        own = {name: getattr(TextRecipe, name) for name in ("column", "separator", "encoding", "split")}
        saved = replace(saved, text=replace(saved.text, **own))
    shards = None if "data" in named or length else saved.shards
    return replace(saved, train=train, optim=optim, shards=shards, data_seed=saved.data_seed + 1)
