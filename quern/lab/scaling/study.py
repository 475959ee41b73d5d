"""`quern lab scaling`: trains an IsoFLOP grid, fits scaling laws to it, and predicts the next budget.

The study's folder has `plan.json`, which never changes: the grid, and the facts of the first start. `cells.jsonl` has
one line per finished run, synced to the disk; `fits.json` is written again after each session. A killed study
continues: no finished run is trained again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quern.lab.names import check_name, compare_facts, locked
from quern.lab.options import ScalingOptions
from quern.lab.scaling.fits import FEWEST_CELLS, envelope
from quern.lab.scaling.isoflop import CONVENTIONS, TOLERANCE, Cell, Plan, make_plan, most_stable
from quern.lab.scaling.parametric import fit_surface
from quern.lab.scaling.report import check_lines, convention_lines, heading, is_budget, plan_lines, stability_lines
from quern.recipe import OPERATIONAL
from quern.records import append_synced, drop_torn_end, read_json, read_lines, strict
from quern.temporaries import write_whole
from quern.terminal import Meter, duration

if TYPE_CHECKING:
    from quern.lab.trainer import Trainer

CELLS, FITS, PLAN = "cells.jsonl", "fits.json", "plan.json"
AHEAD = 10
"""The prediction is for a budget that is larger by this factor than the largest of the study."""


def run(
    options: ScalingOptions,
    trainer: Trainer,
    log: Callable[[str], None],
    source: str | None = None,
    facts: dict[str, Any] | None = None,
) -> int:
    """Trains what the study lacks, then fits.

    Args:
        options: The flags.
        trainer: Trains one run at a time.
        log: Takes lines for the user.
        source: The text of the recipe's file, if it has one.
        facts: Of this start, as from `names.start_facts`; those of the study's first start are kept.

    Returns:
        The exit code: 1 if a run failed. A run that diverged has not failed.

    Raises:
        ValueError: The options are refused, or the study's folder holds another plan, is in use, or was made on another
            kind of device.
    """
    check_name(options.study)
    if options.plan and options.fit:
        raise ValueError("--plan and --fit exclude each other: --plan fits nothing")
    if options.recipe.train.steps is not None or options.recipe.train.minutes is not None:
        raise ValueError("the budget decides how long a run trains: leave out train.steps and train.minutes")
    if len(set(options.sizes)) < FEWEST_CELLS:
        raise ValueError(f"--sizes needs at least {FEWEST_CELLS} sizes: fewer do not determine a minimum")
    seeds = range(options.seeds)
    plan = make_plan(options.recipe, options.budgets, options.sizes, seeds, options.tokens_per_second)
    for line in plan_lines(plan):
        log(line)
    if options.plan:
        return 0
    description = _description(options, plan, source)
    predicted = _predictions(options)
    failed: list[Cell] = []
    if options.fit:
        _check_plan(options.folder, description)
    else:
        with locked(options.folder):
            _keep_plan(options.folder, description, facts, log)
            failed = _train(options, plan, trainer, log)
    body, lines = fit_study(plan, read_lines(options.folder / CELLS), options.resamples, options.level)
    write_whole(options.folder / FITS, json.dumps(body, indent=2, allow_nan=False) + "\n")
    if options.check and predicted:
        lines += ["", *check_lines(options.check, predicted, body)]
    for line in [*lines, f"record: {options.folder / FITS}"]:
        log(line)
    return 1 if failed else 0


# The study's folder -----------------------------------------------------------------------------------------


def _description(options: ScalingOptions, plan: Plan, source: str | None) -> dict[str, Any]:
    recipe = options.recipe.to_json()
    recipe["train"] = {name: value for name, value in recipe["train"].items() if f"train.{name}" not in OPERATIONAL}
    body = {
        "recipe": recipe,
        "source": source,
        "budgets": sorted(set(options.budgets)),
        "sizes": list(dict.fromkeys(options.sizes)),
        "seeds": options.seeds,
        "cells": [cell.to_json() for cell in plan.cells],
    }
    return strict(body)


def _keep_plan(
    folder: Path, description: dict[str, Any], facts: dict[str, Any] | None, log: Callable[[str], None]
) -> None:
    """Writes plan.json of a new study. Raises ValueError if the study has another plan, or other facts that matter."""
    if not (folder / PLAN).exists():
        body = {**description, "facts": facts}
        write_whole(folder / PLAN, json.dumps(body, indent=2, allow_nan=False) + "\n")
    before = _check_plan(folder, description)
    if warning := compare_facts(folder.name, before, facts):
        log(warning)
    drop_torn_end(folder / CELLS)


def _check_plan(folder: Path, description: dict[str, Any]) -> dict[str, Any] | None:
    """Reads plan.json, and raises ValueError if it has another plan. Returns the facts of the study's first start."""
    if not (folder / PLAN).exists():
        raise ValueError(f"there is no study in {folder}: train it first, without --fit")
    old = read_json(folder / PLAN, dict[str, Any])
    facts = old.pop("facts", None)
    differences = list(_differences(old, description))
    if differences:
        raise ValueError(
            f"{folder} holds a study with another plan ({', '.join(differences)} differ): repeat the command that "
            "started it, or name another study with --study"
        )
    return facts


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield prefix + name


def _key(line: dict[str, Any]) -> tuple[float, str, int]:
    return line["budget"], line["size"], line["seed"]


def _flops(line: dict[str, Any]) -> float:
    """FLOPs of the model alone, as the budgets have them."""
    return float(line["flops"] - line.get("flops_parts", {}).get("update", 0))


def _train(options: ScalingOptions, plan: Plan, trainer: Trainer, log: Callable[[str], None]) -> list[Cell]:
    """Trains the cells that have no line yet. Returns those that failed."""
    path = options.folder / CELLS
    finished = {_key(line) for line in read_lines(path)}
    missing = [cell for cell in plan.cells if (cell.budget, cell.size, cell.seed) not in finished]
    if finished:
        log(f"{len(finished)} runs are finished, {len(missing)} are left")
    failed: list[Cell] = []
    done, total, began = 0.0, sum(cell.flops for cell in missing), time.monotonic()
    with Meter("scaling", 100, "% of the FLOPs") as meter:
        for number, cell in enumerate(missing, start=1):

            def progress(step: int, seconds: float, cell: Cell = cell, before: float = done) -> None:
                meter.at(100 * (before + cell.flops * step / cell.steps) / total, cell.name)

            recipe, name = cell.recipe(options.recipe), f"{options.recipe.name}-{cell.size}"
            try:
                trial = trainer.train(recipe, name=name, seed=cell.seed, data_seed=cell.seed, on_step=progress)
            except (RuntimeError, MemoryError) as error:  # such as too little memory for this size: others may fit
                failed.append(cell)
                log(f"{cell.name} failed and is left out: {error}")
            else:
                append_synced(path, strict({"budget": cell.budget, "size": cell.size, **trial.to_json()}))
                score = "diverged" if trial.bpb is None else f"{trial.bpb:.4f} bits per byte"
                log(f"run {number} of {len(missing)}, {cell.name}: {score}, {trial.tokens_per_second:,.0f} tokens/s")
            done += cell.flops
            meter.at(100 * done / total)
    if missing:
        log(f"trained for {duration(time.monotonic() - began)}")
    return failed


def _predictions(options: ScalingOptions) -> dict[str, Any] | None:
    """The fits of the study to check. Raises ValueError if there are none, or if no budget is the one predicted."""
    if options.check is None:
        return None
    folder = options.out / "lab" / options.check
    if not (folder / FITS).is_file():
        raise ValueError(f"there is no fitted study in {folder}: `quern lab scaling --study {folder.name}` makes one")
    fits = read_json(folder / FITS, dict[str, Any])
    flops = fits["predictions"]["flops"]
    if not any(method for name in CONVENTIONS for method in fits["predictions"][name].values()):
        raise ValueError(f"the study {options.check} has no fit, so it predicts nothing: look at its {FITS}")
    if not any(is_budget(one, flops) for one in options.budgets):
        raise ValueError(f"the study {options.check} predicts {flops:g} FLOPs: give that with --budgets")
    return fits


# Fits -------------------------------------------------------------------------------------------------------


def fit_study(
    plan: Plan, lines: Sequence[dict[str, Any]], resamples: int = 1000, level: float = 0.95
) -> tuple[dict[str, Any], list[str]]:
    """Fits every convention to the finished runs.

    Args:
        plan: The plan.
        lines: Of cells.jsonl.
        resamples: Of the bootstrap.
        level: Of the intervals.

    Returns:
        The body of fits.json, and lines for a terminal.
    """
    cells = {(cell.budget, cell.size, cell.seed): cell for cell in plan.cells}
    finished = {_key(line): line for line in lines if _key(line) in cells}
    usable = [line for line in finished.values() if line["bpb"] is not None]
    notes = {
        "diverged": [cells[key].name for key, line in finished.items() if line["bpb"] is None],
        "missing": [cell.name for key, cell in cells.items() if key not in finished] + list(plan.refused),
        "off_budget": [
            f"{cells[_key(line)].name}: {100 * (_flops(line) / line['budget'] - 1):+.1f} %"
            for line in usable
            if abs(_flops(line) / line["budget"] - 1) > TOLERANCE
        ],
    }
    flops = np.array([_flops(line) for line in usable])
    budget, tokens, loss = (np.array([line[name] for line in usable], float) for name in ("budget", "tokens", "bpb"))
    envelopes, surfaces, labels = {}, {}, [cells[_key(line)].name for line in usable]
    for name, convention in CONVENTIONS.items():
        sizes = np.array([line["parameters"][convention.field] for line in usable], float)
        envelopes[name] = envelope(budget, sizes, tokens, loss, resamples=resamples, level=level)
        surfaces[name] = fit_surface(
            sizes, tokens, loss, budget=budget, flops=flops, labels=labels, resamples=resamples, level=level
        )
    stable = most_stable(envelopes)
    ahead = AHEAD * max((cell.budget for cell in plan.cells), default=math.nan)
    predictions = {
        name: {
            "envelope": {} if envelopes[name].refusal else envelopes[name].predict(ahead),
            "surface": {} if surfaces[name].refusal else surfaces[name].predict(ahead),
        }
        for name in CONVENTIONS
    }
    body = {
        "runs": {"planned": len(cells), "used": len(usable), **notes},
        "level": level,
        "resamples": resamples,
        "conventions": {
            name: {
                "meaning": CONVENTIONS[name].meaning,
                "envelope": envelopes[name],
                "surface": surfaces[name],
            }
            for name in CONVENTIONS
        },
        "stable": stable,
        "predictions": {"flops": ahead, **predictions},
    }
    used = [f"{len(usable)} of {len(cells)} runs are used; intervals of {100 * level:g} %"]
    used += [f"{kind.replace('_', ' ')}: {'; '.join(names)}" for kind, names in notes.items() if names]
    report = {name: convention_lines(envelopes[name], surfaces[name], ahead, predictions[name]) for name in CONVENTIONS}
    report["stability"] = stability_lines(stable)
    printed = [*used, *(line for name in CONVENTIONS for line in ("", heading(name), *report[name])), ""]
    return _as_json({**body, "report": report}), [*printed, *report["stability"]]


def _as_json(value: Any) -> Any:
    """JSON types. A dataclass becomes its fields but those hidden in its repr; a number that is not finite, None."""
    if is_dataclass(value):
        return {f.name: _as_json(getattr(value, f.name)) for f in fields(value) if f.repr}
    if isinstance(value, dict):
        return {str(name): _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
