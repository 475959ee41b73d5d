"""Compares the answers of two runs, or of two stages of a run, item by item. It asks no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from quern.eval.answers import Answers, Comparison, compare, read_answers
from quern.records import drop_torn_end
from quern.runs.run_dir import STAGES, RunDir
from quern.terminal import grid

ANSWERS = "answers"
"""The folder of a run with the answers to all tasks, by stage."""


def compare_runs(
    run_dir: RunDir, against: str, tasks: Sequence[str], stage: str | None, log: Callable[[str], None]
) -> list[Comparison]:
    """Compares the answers of two runs, item by item; logs a table and appends to comparisons.jsonl.

    Args:
        run_dir: The first run.
        against: The second: RUN, or RUN/STAGE; without a stage, the same as of the first.
        tasks: Names of scores, or their first parts, such as core. Empty: all that both runs have.
        stage: The stage of the first run. None: its last one with answers.
        log: Takes lines for the user.

    Raises:
        FileNotFoundError: A run has no answers.
        ValueError: The runs share no task, or were asked different items.
    """
    name, _, of_stage = against.partition("/")
    other = RunDir(run_dir.out, name)
    stage = stage or next((one for one in reversed(STAGES) if _answers(run_dir, one)), None)
    of_stage = of_stage or stage or ""
    if of_stage and of_stage not in (*STAGES, "untrained"):
        raise ValueError(f"--against {against}: there is no stage '{of_stage}': use {', '.join(STAGES)}")
    if (run_dir, stage) == (other, of_stage):
        raise ValueError(f"--against {against} names the same model: name another run, or RUN/STAGE")
    pairs = ((run_dir, stage), (other, of_stage))
    first, second = (_answers(run, one) if one else {} for run, one in pairs)
    for (run, one), found in zip(pairs, (first, second), strict=True):
        if not found:
            raise FileNotFoundError(run.has_no(f"answers of stage {one}" if one else "answers", "evaluate"))
    shared = [task for task in first if task in second and (not tasks or _is_of(task, tasks))]
    if not shared:
        there = ", ".join(dict.fromkeys([*first, *second]))
        raise ValueError(f"the runs share none of these tasks: evaluate both with the same --tasks (there: {there})")
    names = (f"{run_dir.run}/{stage}", f"{other.run}/{of_stage}")
    done = [compare(first[task], second[task], names) for task in shared]
    head = ["task", "items", *names, "difference, 95 %", "only first", "only second", "p (McNemar)"]
    rows = [
        [
            *(one.task, f"{one.count:,}", f"{one.first:.3f}", f"{one.second:.3f}"),
            f"{one.first - one.second:+.3f} ({one.low:+.3f} to {one.high:+.3f})",
            *(str(one.only_first), str(one.only_second), "–" if one.p is None else f"{one.p:.3g}"),
        ]
        for one in done
    ]
    for line in grid(head, rows):
        log(line)
    if left := [task for task in dict.fromkeys([*first, *second]) if task not in shared]:
        log(f"not compared: {', '.join(left)}")
    drop_torn_end(run_dir.folder / "comparisons.jsonl")
    run_dir.append("comparisons.jsonl", [{"first": names[0], "second": names[1], **asdict(one)} for one in done])
    return done


def _answers(run_dir: RunDir, stage: str) -> dict[str, Answers]:
    return read_answers(run_dir.folder / ANSWERS / stage)


def _is_of(task: str, names: Sequence[str]) -> bool:
    return any(task == name or task.startswith(f"{name}/") for name in names)
