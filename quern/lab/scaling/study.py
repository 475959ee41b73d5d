"""`quern lab scaling`: trains an IsoFLOP grid, fits scaling laws to it, and predicts the next budget.

`plan.json` has the grid; `cells.jsonl` one line per finished run; `fits.json` is written again after each session.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from quern.lab.options import ScalingOptions
from quern.lab.scaling.fits import FEWEST_CELLS, envelope
from quern.lab.scaling.isoflop import CONVENTIONS, TOLERANCE, Cell, Key, Plan, make_plan, most_stable
from quern.lab.scaling.parametric import fit_surface
from quern.lab.scaling.report import check_lines, convention_lines, heading, is_budget, plan_lines, stability_lines
from quern.lab.study import Study, check_name
from quern.lab.trainer import Trainer
from quern.recipe import OPERATIONAL
from quern.records import read_json, read_lines
from quern.temporaries import write_whole
from quern.terminal import Meter, duration

CELLS, FITS = "cells.jsonl", "fits.json"
AHEAD = 10
"""The prediction is for a budget that is larger by this factor than the largest of the study."""


class Grid(Study):
    """An open IsoFLOP study."""

    PLAN = "plan.json"

    def refresh(self) -> None:
        self.finished: dict[Key, dict[str, Any]] = {}
        for line in read_lines(self.folder / CELLS):
            self.finished.setdefault((line["budget"], line["size"], line["seed"]), line)


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
        facts: Facts of this start, as from `study.start_facts`.

    Returns:
        The exit code: 1 if a run failed. A run that diverged has not failed.
    """
    check_name(options.study)
    if options.plan and options.fit:
        raise ValueError("--plan and --fit exclude each other: --plan fits nothing")
    if options.recipe.train.steps is not None or options.recipe.train.minutes is not None:
        raise ValueError("the budget decides how long a run trains: leave out train.steps and train.minutes")
    if len(set(options.sizes)) < FEWEST_CELLS:
        raise ValueError(f"--sizes needs at least {FEWEST_CELLS} sizes: fewer do not determine a minimum")
    plan = make_plan(options.recipe, options.budgets, options.sizes, range(options.seeds), options.tokens_per_second)
    for line in plan_lines(plan):
        log(line)
    if options.plan:
        return 0
    description = _description(options, plan, source) | {"facts": facts}
    predicted = _predictions(options)
    failed: list[Cell] = []
    if options.fit:
        study = Grid(options.folder)
        study.compare_plan(description)
    else:
        study = Grid.register(options.folder, description)
        if warning := study.compare_facts(facts):
            log(warning)
        failed = _train(study, options, plan, trainer, log)
    body, lines = fit_study(plan, study.finished, options.resamples, options.level)
    write_whole(options.folder / FITS, json.dumps(body, indent=2, allow_nan=False) + "\n")
    if options.check and predicted:
        lines += ["", *check_lines(options.check, predicted, body)]
    for line in [*lines, f"record: {options.folder / FITS}"]:
        log(line)
    return 1 if failed else 0


def _description(options: ScalingOptions, plan: Plan, source: str | None) -> dict[str, Any]:
    recipe = options.recipe.to_json()
    recipe["train"] = {name: value for name, value in recipe["train"].items() if f"train.{name}" not in OPERATIONAL}
    return {
        "recipe": recipe,
        "source": source,
        "budgets": sorted(set(options.budgets)),
        "sizes": list(dict.fromkeys(options.sizes)),
        "seeds": options.seeds,
        "cells": [cell.to_json() for cell in plan.cells],
    }


def _flops(line: dict[str, Any]) -> float:
    """FLOPs of the model alone, as the budgets have them."""
    return float(line["flops"] - line.get("flops_parts", {}).get("update", 0))


def _train(
    study: Grid, options: ScalingOptions, plan: Plan, trainer: Trainer, log: Callable[[str], None]
) -> list[Cell]:
    """Trains the cells that have no line yet. Returns those that failed."""
    failed: list[Cell] = []

    def missing() -> list[Cell]:
        return [cell for cell in plan.cells if cell.key not in study.finished and cell not in failed]

    began, total = time.monotonic(), sum(cell.flops for cell in missing())
    if study.finished:
        log(f"{len(study.finished)} runs are finished, {len(missing())} are left")
    with Meter("scaling", 100, "% of the FLOPs") as meter:

        def train(cell: Cell) -> None:
            before = total - sum(one.flops for one in missing())

            def progress(step: int, seconds: float) -> None:
                meter.at(100 * (before + cell.flops * step / cell.steps) / total, cell.name)

            recipe, name = cell.recipe(options.recipe), f"{options.recipe.name}-{cell.size}"
            try:
                trial = trainer.train(recipe, name=name, seed=cell.seed, data_seed=cell.seed, on_step=progress)
            except (RuntimeError, MemoryError) as error:  # such as too little memory for this size: others may fit
                failed.append(cell)
                log(f"{cell.name} failed and is left out: {error}")
                return
            study.add(CELLS, {"budget": cell.budget, "size": cell.size, **trial.to_json()})
            score = "diverged" if trial.bpb is None else f"{trial.bpb:.4f} bits per byte"
            log(f"{cell.name}: {score}, {trial.tokens_per_second:,.0f} tokens/s; {len(missing())} runs are left")

        study.work(missing, lambda cell: cell.name.replace(" ", "-"), train)
        meter.at(100)
    if total:
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


def fit_study(
    plan: Plan, finished: dict[Key, dict[str, Any]], resamples: int, level: float
) -> tuple[dict[str, Any], list[str]]:
    """Fits every convention to the finished runs. Returns the body of fits.json, and lines for a terminal."""
    cells = {cell.key: cell for cell in plan.cells}
    finished = {key: line for key, line in finished.items() if key in cells}
    usable = {key: line for key, line in finished.items() if line["bpb"] is not None}
    runs = list(usable.values())
    notes = {
        "diverged": [cells[key].name for key, line in finished.items() if line["bpb"] is None],
        "missing": [cell.name for key, cell in cells.items() if key not in finished] + list(plan.refused),
        "off_budget": [
            f"{cells[key].name}: {100 * (_flops(line) / line['budget'] - 1):+.1f} %"
            for key, line in usable.items()
            if abs(_flops(line) / line["budget"] - 1) > TOLERANCE
        ],
    }
    flops = np.array([_flops(line) for line in runs])
    budget, tokens, loss = (np.array([line[name] for line in runs], float) for name in ("budget", "tokens", "bpb"))
    envelopes, surfaces, labels = {}, {}, [cells[key].name for key in usable]
    for name, convention in CONVENTIONS.items():
        sizes = np.array([line["parameters"][convention.field] for line in runs], float)
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
            name: {"meaning": one.meaning, "envelope": envelopes[name], "surface": surfaces[name]}
            for name, one in CONVENTIONS.items()
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
