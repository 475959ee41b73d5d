"""Reports a study on the ladder: verdicts and compute multipliers by rung, their trend, the test of the predictions,
and how many known answers come out right."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from quern.lab.ladder.multiplier import (
    Course,
    Curve,
    Estimate,
    Floats,
    Mean,
    course,
    extrapolate,
    multiplier,
    slope_spread,
    told,
)
from quern.lab.ladder.study import Comparison
from quern.lab.ladder.work import LOOKS, base_scores, finished, judged, judged_trials, proxy_line
from quern.lab.verdict import Finding, Judgement, Rules, reach
from quern.records import strict
from quern.temporaries import write_whole
from quern.terminal import grid

FEWEST_RIGHT = 6 / 7
"""Share of the known answers that a rung must get right."""


@dataclass(frozen=True)
class Row:
    """An idea on the ladder: by rung its finding and ln of its multipliers, drawn; and their course."""

    idea: str
    findings: dict[int, Finding]
    flops: dict[int, Floats] = field(default_factory=dict)
    seconds: dict[int, Floats] = field(default_factory=dict)
    computes: dict[int, float] = field(default_factory=dict)
    """FLOPs of the baseline by rung."""

    @property
    def course(self) -> Course | None:
        rungs = sorted(self.flops)
        return course([self.computes[rung] for rung in rungs], [self.flops[rung] for rung in rungs])


def rows(study: Comparison) -> list[Row]:
    """All ideas of a study, the largest multiplier on its highest rung first. There is none before the first look."""
    judgements = judgements_of(study)
    flops, seconds = (baseline_curve(study, axis) for axis in ("flops", "seconds"))
    found: list[Row] = []
    for idea in study.ideas:
        row = Row(idea, {rung: one.findings[idea] for rung, one in judgements.items() if idea in one.findings})
        for rung, finding in row.findings.items():
            base, own = finished(study, study.plan.base, rung), finished(study, idea, rung)
            if flops is None or finding.pairs < min(LOOKS[0], study.plan.most_pairs):
                continue
            key, spent = f"{idea} {rung}", statistics.fmean(one.flops for one in base)
            row.computes[rung] = spent
            row.flops[rung] = multiplier(flops, spent, statistics.fmean(one.flops for one in own), finding, key)
            speed = study.speeds.get((idea, rung))
            if speed is not None and seconds is not None:
                time = statistics.median(one.seconds for one in base)
                steps = own[0].steps / base[0].steps  # the ratio is that of a step
                logs = multiplier(seconds, time, time * speed.ratio * steps, finding, key)
                noise = np.random.default_rng(rung).standard_normal(len(logs)) * speed.error
                row.seconds[rung] = logs + noise * (np.arange(len(logs)) > 0)
        found.append(row)
    return sorted(found, key=lambda row: -row.flops[max(row.flops)][0] if row.flops else math.inf)


def judgements_of(study: Comparison) -> dict[int, Judgement]:
    """The judgement on each rung that has trials of ideas."""
    rungs = {rung for (arm, rung, _) in study.trials if arm != study.plan.base}
    return {rung: judged(study, rung) for rung in sorted(rungs)}


def baseline_curve(study: Comparison, axis: str, most: float = math.inf) -> Curve | None:
    """The baseline's loss over "flops" or "seconds", on the rungs up to `most`; None for fewer than two rungs with two
    seeds."""
    means: list[Mean] = []
    for rung in map(int, study.plan.rungs):
        trials = finished(study, study.plan.base, rung)
        if len(trials) < 2 or rung > most:
            continue
        scores = base_scores(study, rung)
        compute = statistics.median(getattr(one, axis) for one in trials)
        means.append(Mean(compute, statistics.fmean(scores), statistics.stdev(scores) / math.sqrt(len(scores))))
    return Curve(means) if len(means) > 1 else None


class Prediction(NamedTuple):
    """An idea's multiplier on the top rung, as the rungs below predict it and as it was measured."""

    idea: str
    rung: int
    predicted: Estimate
    measured: float

    @property
    def holds(self) -> bool:
        return self.predicted.low <= self.measured <= self.predicted.high


def predictions(study: Comparison, found: Sequence[Row]) -> list[Prediction]:
    """Predicts each idea's multiplier on its highest rung from those below alone. The interval is that of the
    measurement."""
    made: list[Prediction] = []
    for row in found:
        rungs = sorted(row.flops)
        if len(rungs) < 2:
            continue
        top, below = rungs[-1], rungs[:-1]
        if baseline_curve(study, "flops", most=below[-1]) is None:
            continue
        spread = slope_spread([_part(one, below) for one in found if len(set(below) & set(one.flops)) > 1])
        logs_D = extrapolate(*_part(row, below), row.computes[top], spread)
        noise = np.random.default_rng(top).permutation(row.flops[top] - row.flops[top][0])
        noise[0] = 0.0
        made.append(Prediction(row.idea, top, told(logs_D + noise), math.exp(float(row.flops[top][0]))))
    return made


def _part(row: Row, rungs: Sequence[int]) -> tuple[list[float], list[Floats]]:
    kept = [rung for rung in rungs if rung in row.flops]
    return [row.computes[rung] for rung in kept], [row.flops[rung] for rung in kept]


Table = tuple[str, list[str], tuple[str, ...], list[list[str]]]
"""Title, lines of text, head and rows."""


def study_tables(study: Comparison) -> list[Table]:
    """Titled tables of a study: multipliers with their course, verdicts by rung, the test of the predictions."""
    found, judgements = rows(study), judgements_of(study)
    tables: list[Table] = []
    if len(judgements) > 1:
        head = ("idea", *(f"rung {rung}" for rung in judgements), "from rung to rung", "trend")
        body: list[list[str]] = []
        first = min(LOOKS[0], study.plan.most_pairs)
        begun = [row for row in found if any(one.pairs >= first for one in row.findings.values())]
        for row in begun:
            cells = [str(told(row.flops[rung])) if rung in row.flops else "" for rung in judgements]
            way = row.course
            body.append([row.idea, *cells, *([str(way.factor), way.trend] if way else ["", ""])])
        waiting = [row.idea for row in found if row not in begun]
        few = [f"too few pairs so far: {', '.join(waiting)}"] if waiting else []
        tables.append(("Compute multipliers, by FLOPs", few, head, body))
    for rung, judgement in judgements.items():
        on_rung = sorted((row for row in found if rung in row.findings), key=lambda one: one.findings[rung].difference)
        head = ("idea", "pairs", "difference", "interval", "verdict", "multiplier by FLOPs", "by seconds")
        one = judgement.floor
        floor = f"{one.difference:+.4f} {interval(one)}, {one.verdict}" if one else "not measured"
        noise = f"SD of a pair's difference {judgement.sd:.4f}; A/A floor: {floor}"
        failed = [name for name in study.ideas if any(one.error for one in judged_trials(study, name, rung).values())]
        lines = [proxy_line(study, rung), noise, *([f"could not be trained: {', '.join(failed)}"] if failed else [])]
        body = [
            [row.idea, str(one.pairs), f"{one.difference:+.4f}", interval(one), one.verdict]
            + [str(told(logs[rung])) if rung in logs else "" for logs in (row.flops, row.seconds)]
            for row, one in ((row, row.findings[rung]) for row in on_rung)
        ]
        tables.append((f"Rung {rung}", lines, head, body))
    if made := predictions(study, found):
        held = f"The interval holds for {sum(one.holds for one in made)} of {len(made)} ideas."
        body = [[one.idea, str(one.rung), str(one.predicted), f"{one.measured:.3f}"] for one in made]
        head = ("idea", "rung", "predicted", "measured")
        tables.append(("The highest rung, predicted from those below", [held], head, body))
    return tables


def study_lines(study: Comparison) -> list[str]:
    """The tables of a study as lines for the user."""
    return [line for title, told_, head, body in study_tables(study) for line in (title, *told_, *grid(head, body))]


def interval(finding: Finding) -> str:
    """Returns the interval of a finding, with … for an end that is not finite."""
    return f"[{', '.join(format(end, '+.4f') if math.isfinite(end) else '…' for end in finding.interval)}]"


def write_verdicts(study: Comparison) -> None:
    """Writes `verdicts.json`, which the board reads. It is derived from the records."""
    body: list[dict[str, Any]] = []
    for row in rows(study):
        for rung, one in row.findings.items():
            cell = {"idea": row.idea, "axis": f"steps, rung {rung}", "n": one.pairs, "mean": one.difference}
            body.append(strict({**cell, "interval": one.interval, "verdict": one.verdict}))
    write_whole(study.folder / "verdicts.json", json.dumps(body, indent=1) + "\n")


# Calibration ------------------------------------------------------------------------------------------------


def calibration(study: Comparison, rung: int, answers: Mapping[str, Sequence[str]]) -> list[str]:
    """Says how many known answers a rung gets right, its noise, and what it can find."""
    judgement = judged(study, rung)
    lines, right, still_open = list[list[str]](), 0, 0
    for idea, expected in answers.items():
        one = judgement.findings.get(idea)
        got, difference = ("not measured", "") if one is None else (one.verdict, f"{one.difference:+.4f}")
        ok, is_open = got.removesuffix(", small") in expected, got in ("not measured", "undecided")
        right, still_open = right + ok, still_open + is_open
        lines.append([idea, " or ".join(expected), got, difference, "right" if ok else "open" if is_open else "wrong"])
    scores = base_scores(study, rung)
    known = [one.correlation for one in judgement.findings.values() if math.isfinite(one.correlation)]
    usable = "it may judge" if right >= FEWEST_RIGHT * len(answers) else "do not use it"
    spread = f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else "not measured"
    together = f"{statistics.median(known):.2f}" if known else "not measured"
    undecided = f", {still_open} still open" if still_open else ""
    told_ = [
        *grid(("idea", "known answer", "verdict", "difference", ""), lines),
        f"rung {rung}: {right} of {len(answers)} known answers are right{undecided}: {usable}",
        f"noise: SD of {len(scores)} seeds {spread} bits per byte, SD of a pair's difference {judgement.sd:.4f}, "
        f"correlation of pairs {together}",
    ]
    for pairs in (3, 5, 8, 12):
        rules, ideas = Rules(study.plan.delta, pairs, study.plan.alpha), max(1, len(study.ideas))
        found = reach(judgement.sd, rules, ideas, 2, judgement.shared)
        told_.append(f"{pairs} pairs find an effect of {found.effect:.4f}, and can show a δ of {found.delta:.4f}")
    return told_
