"""The paths of a run (docs/architecture.md, "A run on disk"). All of them are inside one output folder: `out/`, or the
one that `--out` names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from quern.field_types import CONSTRUCTORS
from quern.flags.recipe_file import read_recipe_file
from quern.flags.recipe_flags import Arguments
from quern.recipe import Resolved
from quern.records import drop_torn_end, read_json
from quern.resolve import resolve
from quern.temporaries import NAMES, naming, sha256_of, write_whole
from quern.train import manifest
from quern.validate import RecipeBody, check_body

if TYPE_CHECKING:
    from quern.text.tokenizer import Tokenizer

STAGES = ("pretrain", "sft", "rl")
NEWEST, BEFORE_WARMDOWN = "newest", "before-warmdown"
"""Checkpoints by name; others are steps."""
NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
LOCK = ".lock"
SHOWN_RUNS = 5


class RunFacts(TypedDict, total=False):
    """Objects of run.json that later commands read."""

    tokenizer: dict[str, Any]
    data: dict[str, Any]
    packing: dict[str, Any]
    model: dict[str, Any]


@dataclass(frozen=True)
class RunDir:
    """out: the output folder; run: the run's name (letters, digits, dots, dashes, underscores)."""

    out: Path
    run: str

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.run):
            raise ValueError(f"'{self.run}' cannot name a run: use letters, digits, dots, dashes and underscores")

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.run

    @property
    def chat_history(self) -> Path:
        """The lines typed in `quern chat`."""
        return self.folder / "chat_history"

    @property
    def flags(self) -> str:
        """The command-line flags that name the run."""
        return self.with_out("--run", self.run)

    @property
    def start_flags(self) -> str:
        """The flags of another run, NAME, that begins with this one."""
        return self.with_out("--from", self.run, "--run", "NAME")

    def with_out(self, *flags: str) -> str:
        """Flags, with --out where the run's folder is not in the default one."""
        return shlex.join([*flags, *([] if self.out == Path("out") else ["--out", str(self.out)])])

    @property
    def holder(self) -> str | None:
        """The name of the process that holds the run's lock (run_lock.py); None if no process does."""
        with suppress(FileNotFoundError), open(self.folder / LOCK, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return holder_in(file.fileno())
        return None

    def stage(self, name: str) -> Path:
        return self.folder / name

    def checkpoints(self, stage: str) -> Path:
        return self.stage(stage) / "checkpoints"

    def answers(self, stage: str) -> Path:
        """The folder of a stage's answers to the questions of all tasks."""
        return self.folder / "answers" / stage

    def has_trained(self, stage: str) -> bool:
        """Whether a stage has saved a checkpoint, good or damaged."""
        return bool(manifest.steps(self.checkpoints(stage)))

    def has_stepped(self, stage: str) -> bool:
        """Whether a stage has a model of its own: not only step 0, a copy of the model that it began with."""
        folder = self.checkpoints(stage)
        if (steps := manifest.steps(folder)) != [0]:
            return bool(steps)
        try:  # an imported model is a step 0, too
            origin = manifest.read_manifest(manifest.path_of(folder, 0))["meta"].get("origin") or {}
        except manifest.CheckpointError:
            return True
        return origin.get("base") is None

    @property
    def exports(self) -> bool:
        """Whether `quern grug export` takes the run's JAX model: the `gpt` recipe's, with no base model of PyTorch."""
        recipe = self.stage("grug") / "recipe.json"  # an imported model has none
        make = read_json(recipe, dict[str, Any]).get("make_model") if recipe.exists() else None
        own = make is not None and not str(make).startswith("quern.")
        return self.has_trained("grug") and not own and not (self.stage("pretrain") / "origin.json").exists()

    def require_trained(self, stage: str | None) -> list[str]:
        """The stages that have saved a checkpoint; only `stage`, if it is given. Raises FileNotFoundError for none."""
        found = [name for name in ([stage] if stage else STAGES) if self.has_trained(name)]
        if not found:
            raise FileNotFoundError(self.has_no(f"stage '{stage}'" if stage else "model", stage or "run"))
        return found

    def facts(self) -> dict[str, Any]:
        """The contents of run.json; empty if there is none. Raises ValueError if the file is damaged."""
        path = self.folder / "run.json"
        return dict(read_json(path, RunFacts, "put back a copy of it, or remove it")) if path.exists() else {}

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer. Raises FileNotFoundError or ValueError if it is lost or damaged."""
        from quern.text.tokenizer import Tokenizer  # help does not need NumPy

        path = self.folder / "tokenizer.json"
        if not path.exists() and not any(self.checkpoints(stage).is_dir() for stage in STAGES):
            raise FileNotFoundError(self.has_no("model"))
        try:
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing")
            return Tokenizer.load(path)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{error}. The run's model needs it: {self.put_back_tokenizer}") from error

    @property
    def put_back_tokenizer(self) -> str:
        """The advice for a tokenizer that is lost."""
        return f"put a copy back as {self.folder / 'tokenizer.json'}; {self.out / 'tokenizers'} may have one"

    def has_no(self, what: str, verb: str = "run") -> str:
        """The message for a missing part of the run, or a missing run. verb: the command that makes the part."""
        if not self.folder.is_dir():
            return f"there is no run '{self.run}' under {self.out.absolute()}: {instead_of_no_run(self.out)}"
        exported = verb in ("run", "pretrain") and self.exports
        advice = f"`quern {'grug export' if exported else verb} {self.flags}` makes one"
        if verb == "run" and (who := self.holder):
            advice = f"{who} is training it; wait for its first checkpoint"
        return f"run '{self.run}' has no {what} yet: {advice}"

    def read_recipe(
        self,
        body: dict[str, Any],
        stage: str,
        digest: str | None = None,
        callables: Mapping[str, Callable[..., Any]] | None = None,
    ) -> Resolved:
        """Builds the recipe that a stage or a checkpoint saved as JSON.

        Args:
            stage: Its folder keeps the recipe's own file, if the recipe came from one.
            digest: SHA-256 of that file when training began (origin.json); a file that differs is not executed.
            callables: The recipe's code, where the user named its file.

        Raises:
            ValueError: The recipe's code is missing, has changed, or is not trusted.
        """
        names = [value for name, value in body.items() if name.startswith("make_") and isinstance(value, str)]
        foreign = [name for name in names if name not in CONSTRUCTORS]
        if foreign and not callables:
            kept = self.stage(stage) / "recipe_source.py"
            found = hashlib.sha256(kept.read_bytes()).hexdigest() if kept.exists() else None
            if found is None or found != digest:
                state = "was changed after training" if found and digest else "is not kept with it"
                raise ValueError(
                    f"run '{self.run}' has a recipe of its own ({', '.join(foreign)}), whose file {state}: put back "
                    f"the file that the run was trained with as {kept}"
                )
            require_trusted(self.out, kept)
            try:
                callables = read_recipe_file(kept, foreign[0].partition(":")[0])[0].callables()
            except ValueError as error:  # such as a module beside the file, which is not kept
                raise ValueError(f"{error}. A run keeps one file: add the modules it imports to PYTHONPATH") from error
        try:
            check_body(body)
            return resolve(Resolved.from_json(body, **(callables or {})))
        except ValueError as error:
            told = f"the recipe of run '{self.run}', stage {stage}, cannot be read ({error})"
            raise ValueError(f"{told}: open it with the version of quern that wrote it") from error

    def kept_source(self, stage: str, named: str | None = None) -> str | None:
        """The text of the recipe's file that a stage keeps; None if it keeps none.

        Raises ValueError for a file that is not trusted, unless it has the text of the file that the user `named`.
        """
        kept = self.stage(stage) / "recipe_source.py"
        source = kept.read_text(encoding="utf-8") if kept.exists() else None
        if source not in (None, named):
            require_trusted(self.out, kept)
        return source

    def write(self, name: str, body: dict[str, Any]) -> None:
        """Writes a JSON file of the run's folder atomically."""
        write_whole(self.folder / name, json.dumps(body, indent=2, ensure_ascii=False) + "\n")

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Appends lines to a JSONL file of the run's folder, in place of one that a crash has torn."""
        self.folder.mkdir(parents=True, exist_ok=True)
        drop_torn_end(self.folder / name)
        with naming(self.folder / name), (self.folder / name).open("a", encoding="utf-8", errors=NAMES) as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def command_of(stage: str) -> str:
    """The command that trains a stage."""
    return f"quern {stage}" if stage in STAGES else f"quern {stage} train"


def holder_in(lock: int) -> str:
    """The name of the process that an open lock file tells."""
    return os.pread(lock, 1 << 16, 0).decode("utf-8") or "another process"


def runs_in(out: Path) -> list[RunDir]:
    """The runs of an output folder, the newest first."""
    found = [path for path in out.glob("runs/*") if path.is_dir() and re.fullmatch(NAME, path.name)]
    return [RunDir(out, path.name) for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def instead_of_no_run(out: Path) -> str:
    """Names the runs of an output folder, if it has some, for messages."""
    if runs := runs_in(out):
        return f"name one of {', '.join(one.run for one in runs[:SHOWN_RUNS])}"
    return "make one with `quern run`, or name another folder with --out"


# The Python code of runs ---------------------------------------------------------------------------------------
#
# A run keeps its recipe's file, so a run that somebody else made is a program. out/trusted/<SHA-256> allows a file:
# one that was trained with in this output folder, or that the user allowed. It holds the identity of out/trusted/key,
# its inode number and the time of its change, which no copy or archive keeps: what another output folder allows is not
# allowed here.

FLAG = "--trust-code"


def trust(out: Path, digest: str | None) -> None:
    """Allows the Python file with this SHA-256; None: nothing."""
    if digest is not None and not _trusts(out, digest):
        (out / "trusted").mkdir(parents=True, exist_ok=True)
        (out / "trusted" / "key").open("a", encoding="utf-8").close()
        write_whole(out / "trusted" / digest, _identity(out))


def require_trusted(out: Path, path: Path) -> None:
    """Raises ValueError for a Python file that is not allowed in this output folder."""
    if not _trusts(out, sha256_of(path)):
        raise ValueError(
            f"{path} is Python code that was not run under {out} before, and this command would run it: read it, then "
            f"repeat the command with {FLAG}, which runs it and remembers it"
        )


def trust_runs(arguments: Arguments, log: Callable[[str], None]) -> None:
    """Allows the code of the runs that a command names."""
    out = Path(arguments.value("out") or "out")
    names = [arguments.value("run") or "first", *arguments.repeated(("from", "also"))]
    for name in {name.rpartition("=")[2] for name in names}:
        folder = out / "runs" / name
        paths = [*folder.glob("*/recipe_source.py")]
        for recipe in folder.glob("*/recipe.json"):
            rewards = read_json(recipe, RecipeBody).get("rl", {}).get("rewards", ())
            paths += [path for path in map(Path, rewards) if path.suffix == ".py" and path.is_file()]
        for path in paths:
            trust(out, sha256_of(path))
            log(f"trusted: {path}")


def _identity(out: Path) -> str:
    found = (out / "trusted" / "key").stat()
    return f"{found.st_ino} {found.st_ctime_ns}"


def _trusts(out: Path, digest: str) -> bool:
    path = out / "trusted" / digest
    return path.is_file() and path.with_name("key").is_file() and path.read_text(encoding="utf-8") == _identity(out)
