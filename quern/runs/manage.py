"""`quern runs`: shows the runs of an output folder, and renames, removes and compares them.

Facts come from records and the sizes of files: no checkpoint is opened. Renaming and removing take the run's lock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from quern.flags import check_flags
from quern.records import read_lines
from quern.runs.run_dir import STAGES, RunDir, instead_of_no_run, runs_in
from quern.runs.run_lock import lock_holder, run_lock
from quern.temporaries import remove_whole
from quern.terminal import duration, grid, human_size
from quern.train import manifest

Log = Callable[[str], None]
HEAD = ("name", "stages", "weights", "size", "text", "bits/byte", "age", "")
ALIGNED_LEFT = 2
NONE = "–"
TAKES = {"show": "RUN", "rename": "RUN NEW", "remove": "RUN", "compare": "RUN RUN"}
SHOWN = {
    "command": "command",
    "git": "commit",
    "data.source": "text",
    "data.train.tokens": "tokens of the text",
    "tokenizer.vocabulary": "vocabulary",
    "model.parameters.total": "weights",
}
"""Fields of run.json that are shown of one run, with their labels."""


@dataclass
class RunsOptions:
    """Flags of `quern runs`."""

    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """show RUN, rename RUN NEW, remove RUN…, or compare RUN RUN…, where a run may be RUN/STAGE. Default: a table."""
    out: Path = Path("out")
    """The output folder that has the runs."""
    yes: bool = False
    """Remove without a question."""


def main(arguments: Sequence[str], log: Log, description: str) -> int:
    """Does what the words say. Raises ValueError or OSError where that cannot be done, before anything is changed."""
    options = check_flags.read(RunsOptions, arguments, prog="quern runs", description=description)
    action, *names = options.words or ("",)
    if not action:
        table(options.out, runs_in(options.out), log)
        return 0
    if action not in TAKES:
        action, names = "show", [action, *names]
    few, most = (2, 2) if action == "rename" else (2, len(names)) if action == "compare" else (1, len(names))
    if not few <= len(names) <= most:
        raise ValueError(f"give it the names: quern runs {action} {TAKES[action]}")
    runs = [RunDir(options.out, name.partition("/")[0]) for name in names]
    for one in runs[:1] if action == "rename" else runs:
        if not one.folder.is_dir():
            raise FileNotFoundError(one.has_no("records"))
    if action == "rename":
        rename(runs[0], runs[1], log)
    elif action == "compare":
        compare(names, runs, log)
    elif action == "remove":
        for one in runs:
            if options.yes or asked(one):
                remove(one, log)
    else:
        for one in runs:
            show(one, log)
    return 0


def table(out: Path, runs: Sequence[RunDir], log: Log) -> None:
    """Logs a line of facts for each run."""
    if not runs:
        raise FileNotFoundError(f"there are no runs under {out.absolute()}: {instead_of_no_run(out)}")
    log(str((out / "runs").absolute()))
    for line in grid(HEAD, [_row(one) for one in runs], ALIGNED_LEFT):
        log(line)


def _row(run_dir: RunDir) -> list[str]:
    described, bits = _described(run_dir), bits_per_byte(run_dir)
    size, written = _files(run_dir)
    weights = described.get("model.parameters.total")
    return [
        run_dir.run,
        ", ".join(_steps(run_dir)) or NONE,
        f"{weights / 1e6:,.3g} M" if isinstance(weights, int | float) else NONE,
        human_size(size),
        str(described.get("data.source", NONE)),
        NONE if bits is None else f"{bits:.3f}",
        duration(time.time() - written),
        "running" if lock_holder(run_dir) else "",
    ]


def _described(run_dir: RunDir) -> dict[str, Any]:
    """The values of run.json; none if it is missing or damaged."""
    from quern.runs.origin import flat  # help does not need NumPy

    with suppress(ValueError):
        return flat(run_dir.facts())
    return {}


def _steps(run_dir: RunDir) -> dict[str, int]:
    """The step of the newest checkpoint of each stage that has one."""
    return {stage: max(manifest.steps(run_dir.checkpoints(stage))) for stage in STAGES if run_dir.has_trained(stage)}


def _files(run_dir: RunDir) -> tuple[int, float]:
    """The bytes of all files, and the time at which the newest one was written, in seconds since the epoch."""
    found = [run_dir.folder.stat()]
    for path in run_dir.folder.rglob("*"):
        with suppress(FileNotFoundError):  # a checkpoint that was replaced meanwhile
            found += [path.lstat()] if path.is_file() else []
    return sum(one.st_size for one in found[1:]), max(one.st_mtime for one in found[1:] or found)


def bits_per_byte(run_dir: RunDir) -> float | None:
    """The last validation of the run's pretraining; None if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        lines = (run_dir.stage("pretrain") / "metrics.jsonl").read_bytes().split(b"\n")
        return float(json.loads(next(line for line in reversed(lines) if b'"val_bpb"' in line))["val_bpb"])
    return None


def show(run_dir: RunDir, log: Log) -> None:
    """Logs the facts of one run, its scores and the commands that use it."""
    described, running = _described(run_dir), lock_holder(run_dir)
    size, written = _files(run_dir)
    facts = [("folder", str(run_dir.folder.absolute())), ("in use by", running or "")]
    values = [(label, described.get(name, "")) for name, label in SHOWN.items()]
    facts += [(label, f"{value:,}" if isinstance(value, int) else str(value)) for label, value in values]
    facts += [(f"{stage} steps", f"{step:,}") for stage, step in _steps(run_dir).items()]
    facts += [("size", human_size(size)), ("written", f"{duration(time.time() - written)} ago")]
    scores = {(line["stage"], line["task"]): line for line in read_lines(run_dir.folder / "evaluate.jsonl")}
    facts += [
        (f"{stage} {task}", f"{line['metric']} {line['value']:.3f}")
        for (stage, task), line in scores.items()
        if stage != "untrained" and line.get("value") is not None
    ]
    width = max(len(label) for label, _ in facts)
    for label, value in facts:
        if value:
            log(f"  {label:{width}}  {value}")


def rename(run_dir: RunDir, new: RunDir, log: Log) -> None:
    """Gives a run another name. Raises ValueError if a process trains it, or if there is a run of that name."""
    if new.folder.exists():
        raise ValueError(f"there is a run '{new.run}' already: choose another name, or remove that one first")
    with run_lock(run_dir, f"quern runs rename {run_dir.run} {new.run}"):
        run_dir.folder.rename(new.folder)
    log(f"run '{run_dir.run}' is now '{new.run}': {new.folder.absolute()}")


def asked(run_dir: RunDir) -> bool:
    """Asks whether to remove a run. Raises ValueError where there is no terminal."""
    what = f"run '{run_dir.run}' ({', '.join(_steps(run_dir)) or 'no checkpoint'}; {human_size(_files(run_dir)[0])})"
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError(f"there is no terminal to ask whether to remove {what}: --yes removes it")
    return input(f"remove {what}? [y/N] ").strip().lower() in ("y", "yes")


def remove(run_dir: RunDir, log: Log) -> None:
    """Removes a run. Raises ValueError if a process trains it."""
    size = human_size(_files(run_dir)[0])
    with run_lock(run_dir, f"quern runs remove {run_dir.run}"):
        remove_whole(run_dir.folder)
    log(f"removed run '{run_dir.run}' ({size}); the prepared text stays in {run_dir.out / 'data'}")


def compare(names: Sequence[str], runs: Sequence[RunDir], log: Log) -> None:
    """Logs where runs differ: facts, fields of the recipe, and the answers to the same questions, item by item.

    names: RUN or RUN/STAGE of each of `runs`.
    """
    from quern.runs.against import compare_runs
    from quern.runs.origin import flat, read_origin

    table(runs[0].out, list(dict.fromkeys(runs)), log)
    recipes = [flat(origin.recipe) if (origin := read_origin(one.stage("pretrain"))) else {} for one in runs]
    fields = [name for name in recipes[0] if any(one.get(name) != recipes[0][name] for one in recipes[1:])]
    if fields:
        log("fields of the recipe that differ:")
        for line in grid(["", *names], [[name, *(str(one.get(name, NONE)) for one in recipes)] for name in fields], 1):
            log(line)
    stage = names[0].partition("/")[2] or None
    for other in names[1:]:
        try:
            compare_runs(runs[0], other, (), stage, log)
        except FileNotFoundError as error:
            log(f"answers: {error}")
