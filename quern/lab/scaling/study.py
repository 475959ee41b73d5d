"""`quern lab scaling`: trains an IsoFLOP grid, fits scaling laws to it, and predicts the next budget.

`plan.json` has the grid; `cells.jsonl` one line per finished run; `fits.json` is written again after each session. The
plan, the fits, and the agreement with the predictions of another study are printed as tables.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

import numpy as np

from quern.lab.options import ScalingOptions
from quern.lab.scaling.fits import FEWEST_CELLS, LEVEL, Envelope, Estimate, envelope
from quern.lab.scaling.isoflop import CONVENTIONS, TOLERANCE, Cell, Key, Plan, Stability, make_plan, most_stable
from quern.lab.scaling.parametric import SurfaceFit, fit_surface
from quern.lab.study import Study
from quern.lab.trainer import Trainer
from quern.model.count import flop_counter
from quern.process import waiting
from quern.recipe import OPERATIONAL, Recipe
from quern.records import read_json, read_lines
from quern.resolve import resolve
from quern.runs.training import with_vocabulary
from quern.stages.tokenizers import named_tokenizer
from quern.temporaries import write_whole
from quern.terminal import Meter, counted, duration, grid, silent

CELLS, FITS = "cells.jsonl", "fits.json"
WAYS = "envelope", "surface"  # the two fits of a convention
AHEAD = 10  # the prediction is for a budget that is larger by this factor than the largest of the study
MISFIT = 0.05  # the p of `fits.lack_of_fit` below which a warning is printed


class Grid(Study):
    """An open IsoFLOP study."""

    PLAN = "plan.json"

    def refresh(self) -> None:
        self.finished: dict[Key, dict[str, Any]] = {}
        for line in read_lines(self.folder / CELLS):
            self.finished.setdefault((line["budget"], line["size"], line["seed"]), line)


def planned(options: ScalingOptions, log: Callable[[str], None]) -> Plan:
    """Makes the plan of a study, and logs it. Raises ValueError for flags that make none."""
    if options.recipe.train.steps is not None:
        raise ValueError("the budget decides how long a run trains: leave out train.steps")
    if len(set(options.sizes)) < FEWEST_CELLS:
        raise ValueError(f"--sizes needs at least {FEWEST_CELLS} sizes: fewer do not determine a minimum")
    _predictions(options)  # refuses --check before the plan is printed and the machine is tried out
    recipe, tokenizer = options.recipe, named_tokenizer(options.recipe.text.tokenizer, None, silent)
    recipe = recipe if tokenizer is None else with_vocabulary(recipe, tokenizer)
    plan = make_plan(recipe, options.budgets, options.sizes, range(options.seeds))
    speed = options.tokens_per_second and options.tokens_per_second * flop_counter(resolve(recipe)).per_token()
    for line in plan_lines(plan, speed):
        log(line)
    if not plan.cells:
        raise ValueError("no run meets its budget: change what the reasons above say")
    return plan


def run(
    options: ScalingOptions,
    plan: Plan,
    trainer: Trainer | None,
    log: Callable[[str], None],
    source: str | None = None,
    facts: dict[str, Any] | None = None,
) -> int:
    """Trains what the study lacks, then fits. Returns the exit code: 1 if a run failed; to diverge is not to fail.
    trainer: None fits what there is; source: the text of the recipe's file; facts: facts of this start, as from
    `study.start_facts`."""
    recipe = options.recipe.to_json()
    recipe["train"] = {name: value for name, value in recipe["train"].items() if f"train.{name}" not in OPERATIONAL}
    description = {
        "recipe": recipe,
        "source": source,
        "budgets": sorted(set(options.budgets)),
        "sizes": list(dict.fromkeys(options.sizes)),
        "seeds": options.seeds,
        "cells": [asdict(cell) for cell in plan.cells],
        "facts": facts,
    }
    predicted = _predictions(options)
    failed: list[Cell] = []
    if trainer is None:
        study = Grid(options.folder)
        study.compare_plan(description)
    else:
        study = Grid.register(options.folder, description)
        study.compare_facts(facts, log)
        failed = _train(study, options.recipe, plan, trainer, log)
    with waiting(f"the fit and its {options.resamples:,} repetitions on resampled runs", log=log):
        body, lines = fit_study(plan, study.finished, options.resamples)
    write_whole(options.folder / FITS, json.dumps(body, indent=2, allow_nan=False) + "\n")
    if options.check and predicted:
        lines += ["", *check_lines(options.check, predicted, body)]
    for line in [*lines, f"record: {options.folder / FITS}"]:
        log(line)
    return 1 if failed else 0


def _train(study: Grid, own: Recipe, plan: Plan, trainer: Trainer, log: Callable[[str], None]) -> list[Cell]:
    """Trains the cells that have no line yet. Returns those that failed."""
    failed: list[Cell] = []

    def missing() -> list[Cell]:
        return [cell for cell in plan.cells if cell.key not in study.finished and cell not in failed]

    began, total = time.monotonic(), sum(cell.flops for cell in missing())
    if study.finished:
        log(f"{counted(len(study.finished), 'run')} finished before, {len(missing())} are left")
    with Meter("scaling", 100, "% of the FLOPs") as meter:

        def train(cell: Cell) -> None:
            before = total - sum(one.flops for one in missing())

            def progress(step: int, seconds: float) -> None:
                meter.at(100 * (before + cell.flops * step / cell.steps) / total, cell.name)

            recipe, name = cell.recipe(own), f"{own.name}-{cell.size}"
            try:
                trial = trainer.train(recipe, name=name, seed=cell.seed, data_seed=cell.seed, on_step=progress)
            except (RuntimeError, MemoryError) as error:  # such as too little memory for this size: others may fit
                failed.append(cell)
                log(f"{cell.name} failed and is left out: {error}")
                return
            study.add(CELLS, {"budget": cell.budget, "size": cell.size, **asdict(trial)})
            score = "diverged" if trial.bpb is None else f"{trial.bpb:.4f} bits per byte"
            log(f"{cell.name}: {score}, {trial.tokens_per_second:,.0f} tokens/s; {counted(len(missing()), 'run')} left")

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
        command = f"quern lab scaling --study {folder.name}{options.out_flag}"
        raise ValueError(f"there is no fitted study in {folder}: `{command}` makes one")
    fits = read_json(folder / FITS, dict[str, Any])
    flops = fits["predictions"]["flops"]
    if not any(method for name in CONVENTIONS for method in fits["predictions"][name].values()):
        raise ValueError(f"the study {options.check} has no fit, so it predicts nothing: look at its {FITS}")
    if not any(is_budget(one, flops) for one in options.budgets):
        raise ValueError(f"the study {options.check} predicts {flops:g} FLOPs: give that with --budgets")
    return fits


def _flops(line: dict[str, Any]) -> float:
    """FLOPs of the model alone, as the budgets have them."""
    return float(line["flops"] - line.get("flops_parts", {}).get("update", 0))


def fit_study(plan: Plan, finished: dict[Key, dict[str, Any]], resamples: int) -> tuple[dict[str, Any], list[str]]:
    """Fits every convention to the finished runs. Returns the body of fits.json, and lines for a terminal."""
    cells = {cell.key: cell for cell in plan.cells}
    finished = {key: line for key, line in finished.items() if key in cells}
    usable = {key: line for key, line in finished.items() if line["bpb"] is not None}
    off = [(cells[key].name, _flops(line) / line["budget"] - 1) for key, line in usable.items()]
    notes = {
        "diverged": [cells[key].name for key, line in finished.items() if line["bpb"] is None],
        "missing": [cell.name for key, cell in cells.items() if key not in finished] + list(plan.refused),
        "off_budget": [f"{name}: {100 * share:+.1f} %" for name, share in off if abs(share) > TOLERANCE],
    }
    runs, ahead = list(usable.values()), AHEAD * max((cell.budget for cell in plan.cells), default=math.nan)
    flops = np.array([_flops(line) for line in runs])
    budget, tokens, loss = (np.array([line[name] for line in runs], float) for name in ("budget", "tokens", "bpb"))
    fitted: dict[str, tuple[Envelope, SurfaceFit]] = {}
    for name, convention in CONVENTIONS.items():
        sizes = np.array([line["parameters"][convention.field] for line in runs], float)
        about = {"budget": budget, "flops": flops, "labels": [name for name, _ in off]}
        surface = fit_surface(sizes, tokens, loss, **about, resamples=resamples)
        fitted[name] = envelope(budget, sizes, tokens, loss, resamples=resamples), surface
    stable = most_stable({name: found for name, (found, _) in fitted.items()})
    predictions = {
        name: {way: {} if one.refusal else one.predict(ahead) for way, one in zip(WAYS, both, strict=True)}
        for name, both in fitted.items()
    }
    report = {name: convention_lines(*both, ahead, predictions[name]) for name, both in fitted.items()}
    report["stability"] = _stability_lines(stable)
    body = {
        "runs": {"planned": len(cells), "used": len(usable), **notes},
        "level": LEVEL,
        "resamples": resamples,
        "conventions": {
            name: {"meaning": CONVENTIONS[name].meaning, **dict(zip(WAYS, both, strict=True))}
            for name, both in fitted.items()
        },
        "stable": stable,
        "predictions": {"flops": ahead, **predictions},
        "report": report,
    }
    lines = [f"{len(usable)} of {len(cells)} runs are used; intervals of {100 * LEVEL:g} %"]
    lines += [f"{kind.replace('_', ' ')}: {'; '.join(names)}" for kind, names in notes.items() if names]
    for name, one in CONVENTIONS.items():
        lines += ["", f"{name}: {one.meaning}", *report[name]]
    body = json.loads(json.dumps(body, default=_shown), parse_constant=lambda name: None)  # for what is not finite
    return body, [*lines, "", *report["stability"]]


def _shown(value: Any) -> dict[str, Any]:
    """The fields of a dataclass but those hidden in its repr."""
    return {f.name: getattr(value, f.name) for f in fields(value) if f.repr}


# Tables -----------------------------------------------------------------------------------------------------


def plan_lines(plan: Plan, flops_per_second: float | None) -> list[str]:
    """The plan as a table, with times if the speed is known."""
    head = ("FLOPs", "size", "width", "seed", "parameters", "steps", "batch", "tokens", "time")
    rows = [
        (
            f"{cell.budget:.3g}",
            cell.size,
            f"{cell.width:,}",
            str(cell.seed),
            f"{cell.parameters['chinchilla']:,}",
            f"{cell.steps:,}",
            f"{cell.batch_tokens:,}",
            f"{cell.tokens:,}",
            duration(cell.flops / flops_per_second) if flops_per_second else "-",
        )
        for cell in plan.cells
    ]
    flops = sum(cell.flops for cell in plan.cells)
    total = f"{counted(len(plan.cells), 'run')} of {flops:.3g} FLOPs in all"
    total += f", about {duration(flops / flops_per_second)}" if flops_per_second else ""
    return [*grid(head, rows), *(f"not planned: {reason}" for reason in plan.refused), total]


def convention_lines(
    found: Envelope, surface: SurfaceFit, ahead: float, predictions: Mapping[str, Mapping[str, Estimate]]
) -> list[str]:
    """The fits by one convention."""
    head = ("FLOPs", "runs", "parameters", "tokens", "tokens per parameter", "bits per byte")
    measured = attrgetter("parameters", "tokens", "ratio", "loss")
    rows = [(f"{one.flops:.3g}", str(one.cells), *(str(x or "-") for x in measured(one))) for one in found.optima]
    lines = grid(head, rows)
    lines += [f"  {one.flops:.3g} FLOPs: {one.refusal}" for one in found.optima if one.refusal]
    if found.refusal:
        lines.append(f"  no envelope: {found.refusal}")
    else:
        lines.append(f"  envelope: N* ∝ C^{found.parameters}, D* ∝ C^{found.tokens}, tokens/parameter {found.ratio}")
        lines += [f"  without {flops:.3g} FLOPs: N* ∝ C^{n:.3f}, D* ∝ C^{d:.3f}" for flops, n, d in found.leave_out]
        narrow = f"  lack of fit (p = {found.misfit:.2g}): intervals are too narrow, measure closer to the minima"
        lines += [narrow] if found.misfit < MISFIT else []
    if surface.surface is None:
        lines.append(f"  no parametric fit: {surface.refusal}")
    else:
        names = {"alpha": "α", "beta": "β", "exponent": "a = β / (α + β)"}
        shown = ", ".join(f"{names.get(name, name)} {one}" for name, one in surface.intervals.items())
        lines.append(f"  E + A / N^α + B / D^β: {shown}; one run deviates by {100 * surface.residual_sd:.2f} %")
        lines += [f"  {surface.note}"] if surface.note else []
    for one in surface.leave_out:
        lines.append(f"  without {one.label}: E {one.E:.4g}, α {one.alpha:.3f}, β {one.beta:.3f}, a {one.exponent:.3f}")
    for way, predicted in predictions.items():
        shown = ", ".join(f"{what} {one}" for what, one in predicted.items())
        lines += [f"  at {ahead:.3g} FLOPs by the {way}: {shown}"] if predicted else []
    return lines


def _stability_lines(stable: Stability) -> list[str]:
    if stable.spreads is None or stable.support is None:
        return [f"conventions are not compared: {stable.refusal}"]
    spreads = ", ".join(f"{name} {100 * spread:.0f} %" for name, spread in stable.spreads.items())
    return [
        f"tokens per parameter vary least over the budgets by the convention {stable.name} "
        f"(SD: {spreads}), in {100 * stable.support[stable.name or '']:.0f} % of the resamples"
    ]


def is_budget(budget: float, flops: float) -> bool:
    """Whether a budget is the number of FLOPs that a study predicts."""
    return abs(budget / flops - 1) <= TOLERANCE


def check_lines(name: str, predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Compares the predictions that a study kept with the optima that another one measured at that budget."""
    flops = predicted["predictions"]["flops"]
    rows = []
    for convention in CONVENTIONS:
        optima = measured["conventions"][convention]["envelope"]["optima"]
        optimum = next((one for one in optima if is_budget(one["flops"], flops)), None)
        if optimum is None or optimum["refusal"]:
            reason = optimum["refusal"] if optimum else "no run has finished"
            return [f"the predictions of {name} cannot be checked: {reason}"]
        for way, values in predicted["predictions"][convention].items():
            rows += [(convention, way, at, *_checked(one, optimum[at])) for at, one in values.items() if at in optimum]
    head = ("convention", "method", "at the optimum", "predicted", "measured", "agree")
    return [f"the predictions of {name} for {flops:.3g} FLOPs", *grid(head, rows)]


def _checked(*estimates: Mapping[str, float | None]) -> tuple[str, str, str]:
    """A predicted and a measured estimate as text, and whether their intervals overlap; an end of None is infinite."""
    infinite = {"value": math.nan, "low": -math.inf, "high": math.inf}
    ours, theirs = (
        Estimate(**{name: end if (found := one[name]) is None else found for name, end in infinite.items()})
        for one in estimates
    )
    return str(ours), str(theirs), "yes" if ours.low <= theirs.high and theirs.low <= ours.high else "no"
