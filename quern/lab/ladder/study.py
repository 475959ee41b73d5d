"""A comparison, at one size or on the ladder: its rungs, rules, arms, trials, speeds and n-grams, and fingerprints.

Rungs are sizes on the baseline's compute-optimal line, about a factor of four in FLOPs apart. Every rung reads its text
once, and trains its whole schedule. All share one vocabulary and one context: both change the loss by themselves.
Fingerprints identify a recipe's numbers and an idea's code.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, TypedDict

import quern
from quern.field_types import code_path
from quern.lab.axes import Speed
from quern.lab.study import Study
from quern.lab.trainer import Trial
from quern.lab.verdict import Rules
from quern.recipe import OPERATIONAL, PARTS, Recipe
from quern.records import read_lines, typed
from quern.resolve import resolve
from quern.runs.training import with_vocabulary
from quern.stages.tokenizers import named_tokenizer
from quern.terminal import silent


@dataclass(frozen=True)
class Rung:
    """A size, and how long it trains. Units: layers, channels, tokens, optimizer steps; None leaves it to the arm."""

    steps: int
    batch_tokens: int
    depth: int | None = None
    width: int | None = None
    head_dim: int | None = None
    context: int | None = None
    vocab_size: int | None = None


RUNGS: Mapping[int, Rung] = {
    0: Rung(400, 4096, depth=4, width=96, head_dim=32, context=256, vocab_size=4096),
    1: Rung(800, 4096, depth=6, width=128, head_dim=32, context=256, vocab_size=4096),
    2: Rung(1600, 4096, depth=6, width=192, head_dim=32, context=256, vocab_size=4096),
    3: Rung(1600, 8192, depth=8, width=256, head_dim=64, context=256, vocab_size=4096),
}
"""The rungs by number. Each has two tokens for each parameter of matrices and head: of the sizes that train for 80 s on
one core, those with more tokens score better at equal FLOPs, but hardly better than a trigram (docs/ladder.md)."""

UNRELATED = "schema name data include exclude text.encoding val conversations sft rl shards seed data_seed".split()
"""Parts of a recipe that do not decide what a trial learns, or that its record names apart."""


def at_rung(recipe: Recipe, rung: Rung) -> Recipe:
    """Returns the recipe at a rung's size and length. The rung sets the depth; other settings of the recipe stay. An
    idea with a batch of its own reads as many tokens. Raises ValueError if the recipe sets the width: it is an idea
    about one size."""
    shape, text, train = recipe.model, recipe.text, recipe.train
    if shape.width is not None and rung.width is not None:
        raise ValueError(f"{recipe.name} sets model.width, as a rung does: compare it at one size, without --ladder")
    sizes = {name: getattr(shape, name) or getattr(rung, name) for name in ("width", "head_dim", "context")}
    batch = train.batch_tokens or rung.batch_tokens
    return replace(
        recipe,
        depth=rung.depth or recipe.depth,
        model=replace(shape, **sizes),
        text=replace(text, vocab_size=text.vocab_size or rung.vocab_size),
        train=replace(train, steps=max(1, round(rung.steps * rung.batch_tokens / batch)), batch_tokens=batch),
    )


def numbers(recipe: Recipe) -> str:
    """Returns 16 hex digits of a recipe's resolved numbers. Verdicts on others are on an old baseline. A field that a
    later version adds changes none if its default is False or 0."""
    resolved = resolve(recipe)
    body: dict[str, Any] = resolved.to_json()
    off = {
        f"{part}.{name}"
        for part in PARTS
        for name, default in vars(type(getattr(resolved, part))()).items()
        if default in (False, 0) and body[part][name] == default
    }
    body["unused"] = [name for name in body["unused"] if name not in off]
    for name in (*off, *UNRELATED, *OPERATIONAL):
        part, _, field = name.rpartition(".")
        (body[part] if part else body).pop(field, None)
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def one_size(base: Recipe) -> dict[int, Rung]:
    """Returns the rungs of a comparison at one size: the baseline's own length, and one that is half as long again,
    which tells how its loss falls with compute."""
    train = resolve(with_vocabulary(base, named_tokenizer(base.text.tokenizer, None, silent))).train
    steps, batch = train.steps, train.batch_tokens
    return {0: Rung(steps, batch), 1: Rung(-(-steps * 3 // 2), batch)}


# The fingerprint of code -----------------------------------------------------------------------------------

ROOT = Path(quern.__file__).parent
ROOTS = ("quern.train.loop", "quern.train.state", "quern.data.loader", "quern.eval.bits_per_byte")
"""Modules that every trial runs."""
ROOMS = tuple(
    f"quern.{room}"
    for room in "model kernels optim recipes data resolve train.loop train.state train.step grug".split()
)
"""Modules whose code decides what a trial learns; a fingerprint follows imports through these alone."""


def code_fingerprint(source: str | None, recipe: Recipe) -> str:
    """Returns 16 hex digits of the code of an idea's file (None for a recipe of quern) and of quern's modules that it
    trains with. Docstrings, comments and the layout of the text do not count."""
    own, imports = _parsed(source or "")
    named = [code_path(code).partition(":")[0] for code in recipe.callables().values()]
    waiting, seen = [*ROOTS, *imports, *named], dict[str, str]()
    while waiting:
        name = waiting.pop()
        if name not in seen and name.startswith((*ROOTS, *ROOMS)) and (found := _module(name)):
            seen[name] = found[0]
            waiting += found[1]
    text = own + "".join(f"{name}\n{code}\n" for name, code in sorted(seen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _module(name: str) -> tuple[str, list[str]] | None:
    """A module of quern, parsed; None if there is no such module."""
    stem = ROOT.joinpath(*name.split(".")[1:])
    files = [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    return _parsed(files[0].read_text(encoding="utf-8")) if files else None


def _parsed(source: str) -> tuple[str, list[str]]:
    """The code as text without docstrings, and the modules that it imports."""
    tree, imports = ast.parse(source), list[str]()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    # As Python 3.11 writes it: 3.12 adds an empty list to classes and functions, and 3.13 leaves empty lists out.
    options: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return ast.dump(tree, **options).replace(", type_params=[]", ""), imports


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


ARMS, TRIALS, SPEEDS, BASELINES = "arms.jsonl", "trials.jsonl", "speeds.jsonl", "baselines.jsonl"
FILES = (Study.PLAN, ARMS, TRIALS, SPEEDS, BASELINES)


@dataclass(frozen=True, kw_only=True)
class SpeedRecord(Speed):
    """The speed of an idea on a rung."""

    recipe: str
    rung: int


Ngrams = TypedDict("Ngrams", {"rung": int, "1": float, "2": float, "3": float})
"""Bits per byte of the n-grams that count the baseline's tokens on a rung, by order."""


@dataclass(frozen=True, kw_only=True)
class Plan(Rules):
    """The rules that a comparison fixes before its first run: flags of `CompareOptions`, and what they rest on. rungs:
    by number, as text; numbers: by rung, fingerprints of the baseline's resolved numbers; text, data: fingerprint and
    name of the text; ladder: whether the rungs are sizes, else a baseline that a trigram beats is not refused; facts:
    of the start; vary: what differs between pairs, initial weights and data order; metric: lower is better."""

    base: str
    rungs: dict[str, Rung]
    numbers: dict[str, str]
    text: str
    data: str
    tune: str
    vary: str = "both"
    ladder: bool
    facts: dict[str, Any]
    metric: str = "validation bits per byte after the last step"


@dataclass(frozen=True)
class ArmRecord:
    """An arm when it joined the study. code: `code_fingerprint`; source: text of its file, or ""."""

    arm: str
    registered: str
    commit: str | None
    code: str
    recipe: dict[str, Any]
    source: str


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Trial):
    """A trial that finished or ended in an error, and what it rests on. seed: seed of the pair; value: value of the
    tuned field, None for the recipe's own; changed: tracked files that differed from the commit; time: its end; text,
    numbers, code: fingerprints, as in `Plan` and `ArmRecord`; error: why there is no result."""

    rung: int
    value: float | None = None
    commit: str | None = None
    changed: tuple[str, ...] = ()
    machine: str = ""
    time: str = ""
    text: str = ""
    numbers: str = ""
    code: str = ""
    error: str = ""


class Comparison(Study):
    """An open comparison."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plan = typed(self.body, Plan)

    @classmethod
    def of(cls, folder: Path, plan: Plan, arms: Sequence[ArmRecord]) -> Self:
        """Opens a study, new or begun, and adds the arms that it lacks. Raises ValueError if it has other rules, or the
        code of an arm that has trained has changed."""
        study = cls.register(folder, asdict(plan))
        for file in FILES[1:]:
            (folder / file).touch()
        for arm in arms:
            before = study.arms.get(arm.arm)
            tried = [one for key, runs in study.trials.items() if key[0] == arm.arm for one in runs.values()]
            if before is None or (before.code != arm.code and all(one.error for one in tried)):  # new or repaired
                study.add(ARMS, asdict(arm))
            elif before.code != arm.code:
                raise ValueError(
                    f"the code that {arm.arm} trains with has changed since the study {study.name} began (commit "
                    f"{before.commit}): go back to that commit, save the idea under another name, or name another "
                    "study with --study"
                )
        return study

    def refresh(self) -> None:
        self.arms = {one.arm: one for one in read_lines(self.folder / ARMS, ArmRecord)}
        self.trials: dict[tuple[str, int, float | None], dict[int, TrialRecord]] = {}
        """(arm, rung, value of the tuned field) → seed → trial."""
        for trial in read_lines(self.folder / TRIALS, TrialRecord):
            if trial.code == self.arms.get(trial.recipe, trial).code:  # else its file has been repaired
                self.trials.setdefault((trial.recipe, trial.rung, trial.value), {}).setdefault(trial.seed, trial)
        speeds: list[SpeedRecord] = read_lines(self.folder / SPEEDS, SpeedRecord)
        self.speeds = {(one.recipe, one.rung): one for one in speeds}
        ngrams: list[Ngrams] = read_lines(self.folder / BASELINES, Ngrams)
        self.ngrams = {one["rung"]: one for one in ngrams}

    @property
    def ideas(self) -> list[str]:
        return [name for name in self.arms if name != self.plan.base]

    def runs(self, arm: str, rung: int, value: float | None = None) -> Mapping[int, TrialRecord]:
        """The trials of an arm at a rung, by seed, those that ended in an error included."""
        return self.trials.get((arm, rung, value), {})
