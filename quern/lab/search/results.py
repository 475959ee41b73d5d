"""The results of a sweep: the best trials as a table, importances, edges, and a figure of pairs, from the records."""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.trial import FrozenTrial, TrialState

from quern.lab.search.space import Dimension, Space, change_line, shown, trial_row
from quern.lab.search.trials import TRIALS, Sweep
from quern.lab.verdict import WORST, score
from quern.records import strict
from quern.temporaries import whole_file, write_whole
from quern.terminal import grid
from quern.validate import flag

RESULTS, FIGURE = "results.json", "pairs.svg"
Line = dict[str, Any]
"""A line of `trials.TRIALS`."""
SHOWN_TRIALS, SHOWN_FIELDS = 10, 5  # in the table and in the figure: the most important fields
FEWEST_FOR_IMPORTANCES = 20
BEST_SHARE, FEWEST_BEST = 0.1, 5  # the trials that count as the best, for importances
MEASURED = ("finished", "diverged", "pruned")  # outcomes of trials whose runs were trained; the others have the penalty
WORST_SHOWN = 0.9  # colours end at this quantile of the values, so that a few bad trials do not hide the others


def write_results(sweep: Sweep, study: optuna.Study, space: Space) -> list[str]:
    """Writes results.json and the figure. Returns lines for a terminal. study: Optuna's, of the finished trials."""
    folder, trials = sweep.folder, sweep.finished
    # The value of a trial that Wilcoxon's test ended is a mean over some seeds, though it is COMPLETE to Optuna.
    whole = (trial for trial in trials if trial["bpb"] is not None and trial["outcome"] != "pruned")
    ranked = sorted(whole, key=lambda trial: trial["bpb"])
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
    names = sorted(space, key=lambda name: -weights.get(name, 0.0))[:SHOWN_FIELDS]
    draw_pairs(folder / FIGURE, ranked, [space[name] for name in names])
    return _lines(folder, facts, ranked, names, len(space))


def importances(study: optuna.Study) -> dict[str, float]:
    """Shares with which each field decides whether a trial is among the best tenth (PED-ANOVA, Watanabe et al. 2023,
    arXiv 2304.10255). Pruned trials count as worse than all others. Empty for too few trials."""

    def value(trial: FrozenTrial) -> float:
        pruned = trial.value is None or trial.user_attrs.get("outcome") == "pruned"
        return WORST if pruned else min(float(trial.value or 0.0), WORST)

    every = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
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
    found = []
    for name, one in space.items():
        value = best["values"][name]
        if edge := one.edge(value):
            told = f"the best {flag(name)} ({value:.4g}) is at the {edge} edge of {one.text}: search "
            found.append(f"{told}{'lower' if edge == 'lower' else 'higher'} values too")
    return found


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


def _lines(folder: Path, facts: dict[str, Any], ranked: Sequence[Line], names: list[str], fields: int) -> list[str]:
    rows = [trial_row(trial, names) for trial in ranked[:SHOWN_TRIALS]]
    lines = ["", f"the best {len(rows)} of {facts['trials']:,} trials; bits per byte, and their SD over the seeds"]
    lines += grid(["trial", "bpb", "SD", "runs", "outcome", *map(flag, names)], rows)
    lines += ["", *(f"  {count:,} {outcome}" for outcome, count in facts["outcomes"].items())]
    if change := facts["against_baseline"]:
        lines.append(f"best against the recipe's own values: {change_line(change)} bits per byte on the same seeds")
        lines.append("The best of many is too good by selection: confirm it with `quern lab compare` on other seeds.")
    if facts["importances"]:
        top = [f"{flag(name)} {share:.0%}" for name, share in facts["importances"].items()]
        lines.append(f"importances (PED-ANOVA): {', '.join(top[: 2 * SHOWN_FIELDS])}")
    elif fields > 1:
        lines.append(f"importances need {FEWEST_FOR_IMPORTANCES} trials, {FEWEST_BEST} or more of them not pruned")
    lines += [f"warning: {line}" for line in facts["edges"]]
    best = "no trial finished: none is best"
    if facts["best"]:
        flags = (f"--{flag(name)} {shown(value, 6)}" for name, value in facts["best"]["values"].items())
        best = f"best: {' '.join(flags)}"
    return [*lines, best, f"written: {folder / RESULTS}, {folder / TRIALS}, {folder / FIGURE}"]


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
        else:
            _scale(axes, fields[row], "y", label=column == 0)
        # The best trials are drawn last, on top of the others.
        mapped = axes.scatter(xs[::-1], ys[::-1], s=12, c=scores[::-1], cmap="viridis_r")
        axes.plot(xs[0], ys[0], "*", color="crimson", markersize=10)
        _scale(axes, fields[column], "x", label=row == size - 1)
        axes.tick_params(labelsize=7)
    figure.colorbar(mapped, ax=panels, label="bits per byte", shrink=0.6)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None}, bbox_inches="tight")


def _coordinates(one: Dimension, trials: Sequence[Line]) -> np.ndarray:
    values = [trial["values"][one.name] for trial in trials]
    return np.array([one.choices.index(value) for value in values] if one.choices else values, dtype=float)


def _scale(axes: Axes, one: Dimension, axis: str, label: bool) -> None:
    """Scales an axis for a field. label: also names it."""
    if one.log:
        axes.set(**{f"{axis}scale": "log"})
    if one.choices:
        axes.set(**{f"{axis}ticks": range(len(one.choices)), f"{axis}ticklabels": [*map(shown, one.choices)]})
    if label:
        getattr(axes, f"set_{axis}label")(flag(one.name), fontsize=8)
