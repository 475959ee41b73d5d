"""Records of one stage of a run: JSON lines, which reports and plots read.

A stage folder holds, besides others, `recipe.json` (and `recipe_source.py`), `metrics.jsonl` (a line per logging step
and per validation, with the caller's fields only) and `events.jsonl` (events with UTC times). Lines are strict JSON: a
number that is not finite becomes null, and an event names it. A line is complete when it ends with a newline; a crash
can tear only the last line, which is dropped when the folder is opened again. Trackers are imported on demand.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO, TypedDict, TypeVar, is_typeddict

import msgspec

from quern.temporaries import NAMES, naming, write_whole

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
WAITING_BYTES = 1 << 20
"""The most bytes of lines that wait for room on the disk."""
Kind = TypeVar("Kind")
_NAME = r"(?!\.{1,2}(?:/|$))[^/\\\x00]{1,255}"
FileName = Annotated[str, msgspec.Meta(pattern=f"^{_NAME}$")]
"""A file in the folder of the file that names it."""
FilePath = Annotated[str, msgspec.Meta(pattern=f"^{_NAME}(?:/{_NAME})*$")]
"""A file in that folder or below it."""
Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # msgspec does not read annotated-types


class _Metrics(TypedDict, total=False):
    step: float | None


class FileFacts(TypedDict):
    """The size and the SHA-256 of a file, as a manifest lists them."""

    bytes: Natural
    sha256: str


class Tracker(Protocol):
    """A further destination of metrics, such as TensorBoard."""

    def log(self, metrics: dict[str, Any], step: int) -> None: ...

    def close(self) -> None: ...


class Records:
    """The destination of a stage's numbers. This one, for ranks other than 0, discards them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def metric(self, **fields: Any) -> None:
        pass

    def event(self, kind: str, **fields: Any) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def flush(self) -> None:
        pass


class StageFolder(Records, AbstractContextManager["StageFolder"]):
    """A stage folder open for writing, by one process at a time. Use it in a `with` block or call close().

    Lines for which the disk has no room wait in memory until a later line or `flush` finds room.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()):
        super().__init__(path)
        path.mkdir(parents=True, exist_ok=True)
        self._trackers = tuple(trackers)
        for name in (METRICS, EVENTS):
            drop_torn_end(self.path / name)
        self._metrics, self._events = self._open(METRICS), self._open(EVENTS)

    def _open(self, name: str) -> TextIO:
        return (self.path / name).open("a", WAITING_BYTES, encoding="utf-8", errors=NAMES)

    def metric(self, **fields: Any) -> None:
        """Appends one line of metrics; passes it to the trackers if `step` is among the fields."""
        bad: list[str] = []
        clean = {name: strict(value, name, bad) for name, value in fields.items()}
        _append(self._metrics, clean)
        if bad:
            self.event("non_finite", step=fields.get("step"), fields=bad)
        if "step" in fields:
            for tracker in self._trackers:
                tracker.log(clean, fields["step"])

    def event(self, kind: str, **fields: Any) -> None:
        """Appends one event: its kind, the UTC time, and the fields."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"kind": kind, "time": now} | {name: strict(value, name) for name, value in fields.items()}
        _append(self._events, line)

    def write_recipe(self, recipe_json: dict[str, Any], source: str | None) -> None:
        """Writes recipe.json, and recipe_source.py if the recipe has a file. source: the text of that file."""
        text = json.dumps(recipe_json, indent=2, allow_nan=False)
        write_whole(self.path / "recipe.json", text + "\n")
        if source is not None:
            write_whole(self.path / "recipe_source.py", source)

    def rewind(self, step: int) -> None:
        """Removes metric lines after `step`, atomically: a resumed run writes them again."""
        path = self.path / METRICS
        kept = [line for line in read_lines(path, _Metrics) if (line.get("step") or 0) <= step]
        self._metrics.close()
        write_whole(path, "".join(json.dumps(fields) + "\n" for fields in kept))
        self._metrics = self._open(METRICS)

    def flush(self) -> None:
        """Writes the lines that wait. Raises OSError if the disk has no room for them."""
        for stream in (self._metrics, self._events):
            with naming(stream.name):
                stream.flush()

    def close(self) -> None:
        for stream in (self._metrics, self._events):
            with suppress(OSError):  # who needs the lines calls `flush`
                stream.close()
        for tracker in self._trackers:
            tracker.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics in a stage folder or a file, without a torn last line; empty if there is no file."""
    return read_lines(path / METRICS if path.is_dir() else path)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events in a stage folder or a file, without a torn last line; empty if there is no file."""
    return read_lines(path / EVENTS if path.is_dir() else path)


def git_output(path: Path, *arguments: str) -> str | None:
    """Runs git in a folder and returns its output; None if git fails, is not installed or does not answer."""
    # Without the locks with which git keeps what it found: a commit at the same time would fail.
    command = ["git", "--no-optional-locks", "-C", str(path), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_hash(path: Path) -> str | None:
    """Short hash of the commit at `path`, with "-dirty" if tracked files differ; None outside a git repository."""
    commit = git_output(path, "rev-parse", "--short", "HEAD")
    return commit and commit + ("-dirty" if changed_files(path) else "")


def changed_files(path: Path) -> list[str]:
    """The tracked files that differ from the commit at `path`, relative to the repository's root."""
    # `git diff` would take a lock; the output of `status` has lost the blank before its first line.
    status = git_output(path, "status", "--porcelain", "--untracked-files=no", "--no-renames") or ""
    return [line.split(maxsplit=1)[1].strip('"') for line in status.splitlines()]


# Trackers ---------------------------------------------------------------------------------------------------


class TensorBoardTracker:
    """Writes a stage's numbers to TensorBoard's event files in its folder, `tensorboard/`.

    The first line after a start hides the lines of earlier starts from its step on: a resumed run writes them again.
    """

    def __init__(self, stage: Path, recipe_json: dict[str, Any]):
        self._folder, self._writer = stage / "tensorboard", None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._writer = self._writer or _library("tensorboard").SummaryWriter(str(self._folder), purge_step=step)
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """Sends a stage's numbers to Weights & Biases, as a run of its own in the group of quern's run.

    The stage's folder holds the run's id, so a resumed stage continues its run there; steps that it had sent before
    are not sent twice. Files are in the stage's folder, `wandb/`; `WANDB_MODE=offline` sends nothing and keeps them.
    """

    def __init__(self, stage: Path, recipe_json: dict[str, Any]):
        wandb = _library("wandb")
        mark = stage / "wandb" / "id"
        if not mark.exists():
            mark.parent.mkdir(parents=True, exist_ok=True)
            write_whole(mark, uuid.uuid4().hex[:8])
        try:
            self._run = wandb.init(
                project="quern",
                group=stage.parent.name,
                name=f"{stage.parent.name}/{stage.name}",
                job_type=stage.name,
                id=mark.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(stage),
                config=recipe_json,
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            instead = "log in with `wandb login`, or set WANDB_MODE=offline and send the files later with `wandb sync`"
            raise ValueError(f"Weights & Biases does not start ({error}): {instead}") from error

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _library(tracker: str) -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard" if tracker == "tensorboard" else tracker)
    except ImportError as error:
        raise ImportError(f"{tracker} is not installed: pip install {tracker}, or leave this tracker out") from error


MakeTracker = Callable[[Path, dict[str, Any]], Tracker]
"""Takes the folder and the recipe of a stage that begins to train."""


def find_trackers(names: Sequence[str]) -> tuple[MakeTracker, ...]:
    """Returns what makes the trackers with these names. Raises ImportError for one that is not installed."""
    kinds = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
    for name in names:
        _library(name)
    return tuple(kinds[name] for name in names)


# Lines ------------------------------------------------------------------------------------------------------


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _append(stream: TextIO, fields: dict[str, Any]) -> None:
    stream.write(json.dumps(fields, allow_nan=False) + "\n")
    with suppress(OSError):  # a full disk: the line waits
        stream.flush()  # survives a crash of this process; an fsync would stall every step


def strict(value: Any, name: str = "value", bad: list[str] | None = None) -> Any:
    """The value as strict JSON: numbers that are not finite become None, and their names are added to `bad`; tuples
    become lists. Raises TypeError for something else than plain numbers, strings, lists and dicts."""
    if isinstance(value, dict):
        return {str(key): strict(item, f"{name}.{key}", bad) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item, f"{name}[{index}]", bad) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if bad is not None:
            bad.append(name)
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}: records take plain numbers, strings, lists and dicts")


def append_synced(file: Path, fields: dict[str, Any]) -> None:
    """Appends one JSON line to a file, and waits until it is on the disk."""
    with naming(file), file.open("a", encoding="utf-8", errors=NAMES) as stream:
        stream.write(json.dumps(fields, allow_nan=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_lines(file: Path, kind: Any = dict[str, Any], having: bytes = b"", skip_damaged: bool = False) -> list[Any]:
    """The JSON lines of a file, without a torn last line, each of type `kind`; empty if there is no file.

    having: Bytes that a line must have; lines without them are neither returned nor checked. Raises ValueError, which
    names it, for a complete line that is not JSON, or of another type, unless it is skipped.
    """
    lines = read_regular(file).splitlines(True) if file.exists() else []
    records = []
    for number, line in enumerate((line for line in lines if line.endswith(b"\n")), start=1):
        try:
            if having in line:
                records.append(typed(json.loads(line), kind))
        except (ValueError, RecursionError) as error:
            if not skip_damaged:
                raise ValueError(f"{file}, line {number}, is not a record ({error}): remove that line") from error
    return records


def drop_torn_end(file: Path) -> None:
    """Removes what follows the last newline, which a crash has torn."""
    if not file.exists():
        return
    content = read_regular(file)
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(file, len(whole))


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a value that should be a list of them."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# JSON files -------------------------------------------------------------------------------------------------


def read_json(path: Path, kind: type[Kind], instead: str = "put back a copy of it") -> Kind:
    """Reads a JSON file whose body must have a type.

    Args:
        kind: A dataclass, a TypedDict or a plain type such as dict[str, int].
        instead: The advice on a damaged file, which ends the message.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is a pipe or a device, no JSON, or a value in it has another type; the message says where.
    """
    try:
        return typed(json.loads(read_regular(path)), kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): {instead}") from error


def read_regular(path: Path) -> bytes:
    """The contents of a file. Raises ValueError for a pipe or a device, which may have no end."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise ValueError(f"{path} is no regular file: name another one, or put a copy in its place")
    return path.read_bytes()


def typed(body: Any, kind: type[Kind], exact: bool = False) -> Kind:
    """A JSON value as a type: an object becomes a dataclass; for a TypedDict it stays as it is.

    exact: an object with other keys than the type has is refused. Raises ValueError for a value of another type, or
    one that is missing; the message says where, such as `$.files.a.bytes`.
    """
    try:
        found = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        told = re.sub("`str` matching regex '[^`]*'", "the name of a file inside the same folder", str(error))
        raise ValueError(told) from error
    if exact and (unknown := sorted(body.keys() - kind.__annotations__.keys())):
        raise ValueError(f"Object contains unknown field `{unknown[0]}`")
    return body if is_typeddict(kind) else found
