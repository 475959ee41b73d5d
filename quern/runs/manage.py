"""`quern runs`: shows the runs of an output folder, and renames, removes and compares them.

Facts come from records and the sizes of files: no checkpoint is opened. Renaming and removing take the run's lock.
"""

from __future__ import annotations

import os
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from quern.flags import check_flags
from quern.flags.check_flags import Mark
from quern.records import METRICS, read_lines
from quern.runs.run_dir import STAGES, RunDir, instead_of_no_run, runs_in
from quern.runs.run_lock import refuse_in_use, run_lock
from quern.temporaries import remove_whole
from quern.terminal import duration, grid, human_size

Log = Callable[[str], None]
HEAD = ("name", "stages", "weights", "size", "text", "bits/byte", "age", "")
ALIGNED_LEFT = 2
NONE = "–"
SHOWN = (STAGES[0], "grug", *STAGES[1:])
"""All stages; the first two train a base model, in PyTorch and in JAX."""
TAKES = {"show": "RUN", "rename": "RUN NEW", "remove": "RUN", "compare": "RUN RUN"}


@dataclass
class RunsOptions:
    """Flags of `quern runs`."""

    words: Annotated[tuple[str, ...], Mark.POSITIONAL] = ()
    """show RUN, rename RUN NEW, remove RUN…, or compare RUN RUN…, where a run may be RUN/STAGE. Default: a table."""
    out: Path = Path("out")
    """The output folder that has the runs."""
    yes: bool = False
    """Remove without a question."""


def main(arguments: Sequence[str], log: Log, description: str) -> int:
    """Does what the words say. Raises ValueError or OSError where that cannot be done, before anything is changed."""
    options = check_flags.read(RunsOptions, arguments, prog="quern runs", description=description)
    action, *names = options.words or ("",)
    if action and action not in TAKES:
        action, names = "show", [action, *names]
    least = len(TAKES.get(action, "").split())
    if len(names) < least or (action == "rename" and len(names) > least):
        raise ValueError(f"give it the names: quern runs {action} {TAKES[action]}")
    stages = [name.partition("/")[2] for name in names] if action == "compare" else []
    if unknown := [stage for stage in stages if stage and stage not in SHOWN]:
        raise ValueError(f"there is no stage '{unknown[0]}': use {', '.join(SHOWN[:-1])} or {SHOWN[-1]}")
    runs = [RunDir(options.out, name.partition("/")[0] if action == "compare" else name) for name in names]
    for one in runs[:1] if action == "rename" else runs:
        if not one.folder.is_dir():
            raise FileNotFoundError(one.has_no("records"))
        if action == "remove":
            refuse_in_use(one, instead="")
    if action == "rename":
        rename(runs[0], runs[1], log)
    elif action == "compare":
        compare(names, runs, log)
    elif not action:
        table(options.out, runs_in(options.out), log)
    for one in dict.fromkeys(runs):
        if action == "show":
            show(one, log)
        elif action == "remove" and (options.yes or asked(one)):
            remove(one, log)
    return 0


def table(out: Path, runs: Sequence[RunDir], log: Log) -> None:
    """Logs a line of facts for each run."""
    if not runs:
        raise FileNotFoundError(f"there are no runs under {out.absolute()}: {instead_of_no_run(out)}")
    log(str((out / "runs").absolute()))
    for line in grid(HEAD, [_row(one) for one in runs], ALIGNED_LEFT):
        log(line)


def _row(run_dir: RunDir) -> list[str]:
    """The cells under HEAD."""
    facts, bits = _facts(run_dir), bits_per_byte(run_dir)
    weights = facts.get("model", {}).get("parameters", {}).get("total")
    size, written = _files(run_dir)
    return [
        run_dir.run,
        ", ".join(stage for stage in SHOWN if run_dir.has_trained(stage)) or NONE,
        NONE if weights is None else f"{weights / 1e6:,.3g} M",
        human_size(size),
        facts.get("data", {}).get("source", NONE),
        NONE if bits is None else f"{bits:.3f}",
        duration(time.time() - written),
        "running" if run_dir.holder else "",
    ]


def _facts(run_dir: RunDir) -> dict[str, Any]:
    with suppress(ValueError):
        return run_dir.facts()
    return {}  # a damaged file, which only the verbs that need it refuse


def _files(run_dir: RunDir) -> tuple[int, float]:
    """The bytes of all files, and the time at which the newest one was written, in seconds since the epoch."""
    size, written = 0, 0.0
    for folder, _, names in os.walk(run_dir.folder):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(FileNotFoundError):  # a checkpoint that was replaced meanwhile
                found = os.lstat(path)
                size, written = size + found.st_size * (path != folder), max(written, found.st_mtime)
    return size, written


def bits_per_byte(run_dir: RunDir) -> float | None:
    """The last validation of the run's pretraining, in PyTorch or else in JAX; None if there is none."""
    for stage in SHOWN[:2]:
        with suppress(OSError, ValueError, LookupError, TypeError):
            lines = read_lines(run_dir.stage(stage) / METRICS, having=b'"val_bpb"', skip_damaged=True)
            return float(lines[-1]["val_bpb"])
    return None


def show(run_dir: RunDir, log: Log) -> None:
    """Logs the facts of one run, and the last scores of each of its stages."""
    told = dict(zip(HEAD[:-1], _row(run_dir), strict=False)) | {"folder": str(run_dir.folder.absolute())}
    told |= {"command": _facts(run_dir).get("command", NONE), "in use by": run_dir.holder or "nobody"}
    for line in read_lines(run_dir.folder / "evaluate.jsonl"):
        if line["stage"] != "untrained" and line.get("value") is not None:
            told[f"{line['stage']} {line['task']}"] = f"{line['metric']} {line['value']:.3f}"
    for label, value in told.items():
        log(f"  {label:{max(map(len, told))}}  {value}")


def rename(run_dir: RunDir, new: RunDir, log: Log) -> None:
    """Gives a run another name. Raises ValueError if a process trains it, or if there is a run of that name."""
    if new.folder.exists():
        raise ValueError(f"there is a run '{new.run}' already: choose another name, or remove that one first")
    with run_lock(run_dir, f"quern runs rename {run_dir.run} {new.run}", instead=""):
        run_dir.folder.rename(new.folder)
    log(f"run '{run_dir.run}' is now '{new.run}': {new.folder.absolute()}")


def asked(run_dir: RunDir) -> bool:
    """Asks whether to remove a run. Raises ValueError where there is no terminal."""
    what = f"run '{run_dir.run}' ({human_size(_files(run_dir)[0])})"
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError(f"there is no terminal to ask whether to remove {what}: --yes removes it")
    with suppress(EOFError):  # Ctrl-D
        return input(f"remove {what}? [y/N] ").strip().lower() in ("y", "yes")
    return False


def remove(run_dir: RunDir, log: Log) -> None:
    """Removes a run. Raises ValueError if a process trains it."""
    size = human_size(_files(run_dir)[0])
    with run_lock(run_dir, f"quern runs remove {run_dir.run}", instead=""):
        remove_whole(run_dir.folder)
    log(f"removed run '{run_dir.run}' ({size}); the prepared text stays in {run_dir.out / 'data'}")


def compare(names: Sequence[str], runs: Sequence[RunDir], log: Log) -> None:
    """Logs where runs differ: facts, fields of the recipe, and the answers to the same questions, item by item.

    names: RUN or RUN/STAGE of each of `runs`.
    """
    from quern.runs.origin import flat, read_origin

    table(runs[0].out, list(dict.fromkeys(runs)), log)
    asked_for = [[stage] if (stage := name.partition("/")[2]) else SHOWN for name in names]
    origins = [
        next(filter(None, map(read_origin, map(one.stage, stages))), None)
        for one, stages in zip(runs, asked_for, strict=True)
    ]
    recipes = [flat(origin.recipe) if origin else {} for origin in origins]
    known = [recipe for recipe in recipes if recipe]  # which a stage that is not there lacks
    fields = [name for name in ChainMap(*known) if any(one.get(name) != known[0].get(name) for one in known)]
    if fields:
        log(f"fields of the recipe that differ, {' | '.join(names)}:")
    for name in fields:  # no table: a long value would widen every row
        values = [str(one.get(name, NONE)).replace("\n", "\\n") for one in recipes]
        log(f"  {name}: {' | '.join(values)}")
    for other in names[1:]:
        if any(name.endswith("/grug") for name in (names[0], other)):
            continue  # a stage of JAX answers no questions
        try:
            compare_answers(names[0], other, runs[0].out, log)
        except FileNotFoundError as error:
            log(f"answers: {error}")


def compare_answers(first: str, second: str, out: Path, log: Log) -> None:
    """Logs the scores of two models, item by item, and appends them to the first run's comparisons.jsonl.

    first, second: RUN or RUN/STAGE; without a stage, the last one of which both have answers. Raises
    FileNotFoundError for a model without answers, ValueError for one model or where no task has the same questions.
    """
    from quern.eval.answers import Comparison, compare, read_answers  # late: they need NumPy

    (one, _, stage), (other, _, of_stage) = first.partition("/"), second.partition("/")
    run, other = RunDir(out, one), RunDir(out, other)
    answered = [name for name in reversed(STAGES) if read_answers(run.answers(name))]
    both = [name for name in answered if of_stage or read_answers(other.answers(name))]
    stage = stage or next(iter([*both, *answered]), "")
    of_stage = of_stage or stage
    if (run, stage) == (other, of_stage):
        raise ValueError(f"{first} and {second} are the same model: name another run, or RUN/STAGE")
    found = []
    for one, name in ((run, stage), (other, of_stage)):
        found.append(read_answers(one.answers(name)) if name else {})
        if not found[-1] and name:
            one.require_trained(name)
            raise FileNotFoundError(one.has_no(f"answers of stage {name}", f"evaluate --tasks TASK --stage {name}"))
        if not found[-1]:
            raise FileNotFoundError(one.has_no("answers", "evaluate --tasks TASK"))
    shared = [task for task in found[0] if task in found[1]]
    there = list(dict.fromkeys([*found[0], *found[1]]))
    if not shared:
        raise ValueError(f"the runs share no task: evaluate both with the same --tasks (there: {', '.join(there)})")
    names = (f"{run.run}/{stage}", f"{other.run}/{of_stage}")
    done, refused = list[Comparison](), list[str]()
    for task in shared:
        try:
            done.append(compare(task, found[0][task], found[1][task], names))
        except ValueError as error:  # such as another --limit
            refused.append(str(error))
    if not done:
        raise ValueError(refused[0])
    head = ["task", "items", *names, "difference, 95 %", "only first", "only second", "p (McNemar)"]
    rows = [
        [
            *(one.task, f"{one.count:,}", f"{one.first:.3f}", f"{one.second:.3f}"),
            f"{one.first - one.second:+.3f}" + ("" if one.low is None else f" ({one.low:+.3f} to {one.high:+.3f})"),
            *(str(one.only_first), str(one.only_second), NONE if one.p is None else f"{one.p:.3g}"),
        ]
        for one in done
    ]
    for line in grid(head, rows):
        log(line)
    left = [task for task in there if task not in shared]
    for line in filter(None, [", ".join(left), *refused]):
        log(f"not compared: {line}")
    run.append("comparisons.jsonl", [{"first": names[0], "second": names[1], **asdict(one)} for one in done])
