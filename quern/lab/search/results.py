"""The results of a sweep, from the records: tables for the terminal and the log, importances, edges, a figure of pairs.

Only the importances need Optuna.
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quern.flags.check_flags import negated
from quern.lab.search.space import Dimension, Space, shown
from quern.lab.study import Study, data_names
from quern.lab.verdict import WORST, score
from quern.records import strict
from quern.report.plots import log_ticks, svg
from quern.temporaries import write_whole
from quern.terminal import counted, grid
from quern.validate import flag

if TYPE_CHECKING:
    import optuna

RESULTS, TRIALS, FIGURE = "results.json", "sweep.jsonl", "pairs.svg"
Line = dict[str, Any]  # a line of `TRIALS`
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # the head and the rows
SHOWN_TRIALS, SHOWN_FIELDS, DRAWN_FIELDS = 10, 6, 5  # the best trials; the most important fields
FEWEST_FOR_IMPORTANCES = 20
BEST_SHARE, FEWEST_BEST = 0.1, 5  # the trials that count as the best, for importances
MEASURED = ("finished", "diverged", "pruned")  # outcomes of trials whose runs were trained; the others have the penalty
WORST_SHOWN = 0.9  # colours end at this quantile of the values, so that a few bad trials do not hide the others


def write_results(sweep: Study, trials: Sequence[Line], study: optuna.Study, space: Space) -> list[str]:
    """Writes results.json and the figure. Returns lines for a terminal. trials: the finished ones; study: Optuna's, of
    the same trials."""
    folder = sweep.folder
    # The value of a trial that Wilcoxon's test ended is a mean over some seeds, though it is COMPLETE to Optuna.
    ranked = sorted((trial for trial in trials if trial["outcome"] != "pruned"), key=lambda trial: trial["bpb"])
    if not ranked:
        return ["no trial has a value"]
    weights, outcomes = importances(study), [str(trial["outcome"]) for trial in trials]
    best = next((trial for trial in ranked if trial["outcome"] == "finished"), None)
    facts = {
        "plan": {name: value for name, value in sweep.body.items() if name != "facts"},
        "facts": sweep.body["facts"],
        "trials": len(trials),
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
        "best": best,
        "against_baseline": best and against_baseline(best, trials),
        "importances": weights,
        "edges": edge_warnings(space, best) if best else [],
    }
    write_whole(folder / RESULTS, json.dumps(strict(facts), indent=2, allow_nan=False) + "\n")
    names = sorted(space, key=lambda name: -weights.get(name, 0.0))[:DRAWN_FIELDS]
    draw_pairs(folder / FIGURE, ranked, [space[name] for name in names])
    return _lines(folder, facts, trials)


def importances(study: optuna.Study) -> dict[str, float]:
    """Shares with which each field decides whether a trial is among the best tenth, at least five (PED-ANOVA, Watanabe
    et al. 2023, arXiv 2304.10255). Trials that Wilcoxon's test ended count as the worst, those that Hyperband ended do
    not count. Empty for too few trials."""
    import optuna

    def value(trial: optuna.trial.FrozenTrial) -> float:
        pruned = trial.value is None or trial.user_attrs.get("outcome") == "pruned"
        return WORST if pruned else min(float(trial.value or 0.0), WORST)

    every = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    best = max(BEST_SHARE, FEWEST_BEST / max(1, len(every)))
    good = sum(value(trial) < WORST for trial in every)
    if len(every) < FEWEST_FOR_IMPORTANCES or good < math.ceil(best * len(every)):
        return {}
    # Against the whole space: a sampler that adapts does not draw from all of it.
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best, evaluate_on_local=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*low `target` values")  # low values are what is meant
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, target=value)
    return {name: round(float(weight), 4) for name, weight in found.items()}


def edge_warnings(space: Space, best: Line) -> list[str]:
    """One line for each field whose best value is at the edge of its range."""
    return [
        f"the best {flag(name)} ({best['values'][name]:.4g}) is at the {edge} edge of {one.text}: search "
        f"{'lower' if edge == 'lower' else 'higher'} values too"
        for name, one in space.items()
        if (edge := one.edge(best["values"][name]))
    ]


def against_baseline(best: Line, trials: Sequence[Line]) -> dict[str, float] | None:
    """The mean difference of the best trial from the recipe's own values, and its standard error over the seeds."""
    own = [trial for trial in trials if trial["baseline"]]
    if not own or own[0]["trial"] == best["trial"] or own[0]["outcome"] not in MEASURED:
        return None
    pairs = zip(best["runs"], own[0]["runs"], strict=False)  # the first seeds, if the baseline was pruned
    differences = [score(ours["bpb"]) - score(theirs["bpb"]) for ours, theirs in pairs]
    if not differences:
        return None
    spread = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return {"bpb": statistics.fmean(differences), **({"standard_error": spread} if math.isfinite(spread) else {})}


def summary(facts: dict[str, Any]) -> str:
    """A sentence on a sweep. facts: the contents of `RESULTS`, here and below."""
    plan, recipe = facts["plan"], facts["plan"]["recipe"]
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in facts["outcomes"].items())
    fields, seeds = counted(len(plan["space"]), "field"), counted(len(plan["seeds"]), "seed")
    return (
        f"A sweep of {fields} of `{recipe['name']}`, depth {recipe['depth']}, on `{data_names(recipe['data'])}`: "
        f"{counted(facts['trials'], 'trial')} ({outcomes}) of {seeds} each."
    )


def best_line(facts: dict[str, Any]) -> str:
    """A sentence on the best trial, and on its difference from the recipe's own values."""
    change = facts["against_baseline"]
    if facts["best"] is None:
        return "No trial finished."
    best = f"The best trial has {facts['best']['bpb']:.4f} bits per byte"
    if change is None:
        return f"{best}."
    error = f" ± {change['standard_error']:.4f}" if "standard_error" in change else ""
    told = f"{best}, {change['bpb']:+.4f}{error} against the recipe's own values"
    return f"{told}; it is selected, so this is too good."


def importance_table(facts: dict[str, Any]) -> Table:
    """The fields, the most important one first."""
    rows = sorted(facts["importances"].items(), key=lambda entry: -entry[1])
    return ("field", "importance"), [(flag(name), f"{share:.1%}") for name, share in rows]


def trial_table(facts: dict[str, Any], trials: Sequence[Line]) -> Table:
    """The best whole trials: number, bits per byte, their SD over the seeds, values of the most important fields."""
    weights = facts["importances"]
    names = sorted(weights or facts["plan"]["space"], key=lambda name: -weights.get(name, 0.0))[:SHOWN_FIELDS]
    whole = [trial for trial in trials if trial["outcome"] in ("finished", "diverged")]
    rows: list[tuple[str, ...]] = []
    for trial in sorted(whole, key=lambda one: one["bpb"])[:SHOWN_TRIALS]:
        scores = [score(run["bpb"]) for run in trial["runs"]]
        spread = f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        label = f"{trial['trial']}{' (baseline)' if trial['baseline'] else ''}"
        rows.append((label, f"{trial['bpb']:.4f}", spread, *(shown(trial["values"][name]) for name in names)))
    return ("trial", "bits per byte", "SD", *map(flag, names)), rows


def _lines(folder: Path, facts: dict[str, Any], trials: Sequence[Line]) -> list[str]:
    lines = ["", summary(facts), best_line(facts), *grid(*trial_table(facts, trials)), ""]
    if facts["importances"]:
        head, rows = importance_table(facts)
        lines += grid(head, rows[:SHOWN_TRIALS])
    elif len(facts["plan"]["space"]) > 1:
        lines.append(
            f"importances need {FEWEST_FOR_IMPORTANCES} trials that Hyperband did not end, of which a tenth, and at "
            f"least {FEWEST_BEST}, have a score and were not pruned"
        )
    lines += [f"warning: {line}" for line in facts["edges"]]
    if facts["best"]:
        lines += [
            f"best: {' '.join(starmap(_as_flag, facts['best']['values'].items()))}",
            "confirm it with `quern lab compare`, whose seeds are 0, 1, …: sweep with --seed 1000 for others",
        ]
    return [*lines, f"written: {folder / RESULTS}, {folder / TRIALS}, {folder / FIGURE}"]


def _as_flag(name: str, value: Any) -> str:
    """The flag that gives a field this value. None is the value without a flag."""
    own = f"--{flag(name)}"
    if isinstance(value, bool):
        return own if value else negated(own)
    return f"(no {own})" if value is None else f"{own} {shown(value, 6)}"


# The figure -------------------------------------------------------------------------------------------------


def draw_pairs(path: Path, ranked: Sequence[Line], fields: Sequence[Dimension]) -> None:
    """Draws each field against the value (on the diagonal) and each pair of fields, coloured by the value."""
    scores, size = np.array([trial["bpb"] for trial in ranked]), len(fields)
    worst = float(np.quantile(scores, WORST_SHOWN))
    scores = np.minimum(scores, worst if worst > scores[0] else scores.max())
    figure = Figure(figsize=(2.4 * size + 2.0, 2.0 * size + 1.0))
    panels: Any = figure.subplots(size, size, squeeze=False, gridspec_kw={"wspace": 0.35, "hspace": 0.35})
    mapped: Any = None
    for row, column in np.ndindex(size, size):
        axes = panels[row][column]
        axes.set_visible(column <= row)
        if column > row:
            continue
        xs, ys = _coordinates(fields[column], ranked), _coordinates(fields[row], ranked)
        if row == column:
            ys = scores
            axes.set_title("bits per byte", fontsize=7)
        # The best trials are drawn last, on top of the others.
        mapped = axes.scatter(xs[::-1], ys[::-1], s=12, c=scores[::-1], cmap="viridis_r")
        axes.plot(xs[0], ys[0], "*", color="crimson", markersize=10)
        _scale(axes, fields[column], "x", label=row == size - 1)
        if row != column:
            _scale(axes, fields[row], "y", label=column == 0)
        axes.tick_params(labelsize=7)
    figure.colorbar(mapped, ax=panels, label="bits per byte", shrink=0.6)
    write_whole(path, svg(figure, bbox_inches="tight"))


def _coordinates(one: Dimension, trials: Sequence[Line]) -> np.ndarray:
    values = [trial["values"][one.name] for trial in trials]
    return np.array([one.choices.index(value) for value in values] if one.choices else values, dtype=float)


def _scale(axes: Axes, one: Dimension, axis: str, label: bool) -> None:
    """Scales an axis for a field, after its trials are drawn. label: also names it."""
    if one.log:
        axes.set(**{f"{axis}scale": "log"})
        log_ticks(getattr(axes, f"{axis}axis"), 3)
    if one.choices:
        axes.set(**{f"{axis}ticks": range(len(one.choices)), f"{axis}ticklabels": [*map(shown, one.choices)]})
    if label:
        getattr(axes, f"set_{axis}label")(flag(one.name), fontsize=8)
