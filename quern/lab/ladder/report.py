"""Reports a study on the ladder: verdicts and compute multipliers by rung, their trend, the test of the predictions,
and how many known answers come out right.

A compute multiplier says how much less compute an idea needs than the baseline for the same loss. The baseline's loss
over compute C is L(C) = E + A / C^α, fitted to its mean loss on each rung (Hestness et al. 2017, arXiv 1712.00409). An
idea that at a rung spends c and whose loss is the baseline's there + d (d below 0 is better) has the multiplier
m = C(L(C₀) + d) / c, where C₀ is what the baseline spends and C(·) inverts L. Intervals are quantiles over draws of the
baseline's means and of d; they do not cover the error of the law itself, which matters little close to C₀.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from quern.lab.ladder.study import Comparison
from quern.lab.ladder.work import TUNE_SEEDS, base_scores, chosen, finished, judged, judged_trials, proxy_line
from quern.lab.verdict import FIRST_LOOK, Finding, Floats, Judgement, reach
from quern.records import strict
from quern.temporaries import write_whole
from quern.terminal import counted, grid

DRAWS, SEED, LEVEL = 2_000, 7, 0.95
LIMITS = 64  # values of E that are tried, from 0 to 98 % of the lowest loss
STEP = math.log(4)  # distance of two rungs in ln C
MOST = math.log(1000)  # largest |ln m|: the baseline may never reach a loss
HOLDS = 0.02  # a multiplier that changes by less than this share from rung to rung holds
SMALL = 0.05
LEAST_SPREAD = 0.35 / STEP
"""Least standard deviation of the slopes: ln m changes by a third from rung to rung. It is assumed, not measured."""
FEWEST_RIGHT = 6 / 7  # share of the known answers that a rung must get right
Trend = Literal["grows", "holds", "fades", "unclear"]


class Estimate(NamedTuple):
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Curve:
    """The baseline's loss over compute: a fit, and DRAWS fits of redrawn means, whose first is the fit itself.

    Two rungs give a straight line in logarithms (E = 0), three or more the whole law. means: of two rungs or more, the
    compute (FLOPs or seconds), the mean loss there, and its standard error.
    """

    def __init__(self, means: Sequence[tuple[float, float, float]]) -> None:
        noise = np.random.default_rng(SEED).standard_normal((DRAWS, len(means))) * (np.arange(DRAWS) > 0)[:, None]
        compute_R, loss_R, error_R = np.array(sorted(means)).T
        losses_DR, x_R = loss_R + noise * error_R, np.log(compute_R)
        shares = np.linspace(0, 0.98, LIMITS) if len(means) > 2 else np.zeros(1)
        best = np.full(DRAWS, math.inf)
        self.limit, self.level, self.slope = np.zeros(DRAWS), np.zeros(DRAWS), np.zeros(DRAWS)
        for share in shares:
            limit = share * losses_DR.min(1)
            y_DR = np.log(losses_DR - limit[:, None])
            slope = ((x_R - x_R.mean()) * y_DR).sum(1) / np.square(x_R - x_R.mean()).sum()
            level = y_DR.mean(1) - slope * x_R.mean()
            misfit = np.square(limit[:, None] + np.exp(level[:, None] + slope[:, None] * x_R) - losses_DR).sum(1)
            better = misfit < best
            for kept, value in ((best, misfit), (self.limit, limit), (self.level, level), (self.slope, slope)):
                kept[better] = value[better]

    def loss(self, compute: float) -> Floats:
        """The loss at a compute, by draw."""
        return self.limit + np.exp(self.level + self.slope * math.log(compute))

    def log_compute(self, loss_D: Floats) -> Floats:
        """ln C at which the baseline reaches a loss, by draw; inf for a loss that it never reaches."""
        above = loss_D - self.limit
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (np.log(above) - self.level) / self.slope
        return np.where(above > 0, found, math.inf)


def multiplier(curve: Curve, base: float, own: float, found: Finding, key: str = "") -> Floats:
    """ln of an idea's compute multiplier, by draw; the first is the estimate. base, own: what the baseline and the idea
    spend; key: names the draws of the difference, which each idea and rung has for itself; all have the same draws
    of the baseline's curve."""
    degrees, generator = found.degrees, np.random.default_rng([SEED, *key.encode()])
    noise = generator.standard_t(min(degrees, 1e6), DRAWS) if degrees > 0 else np.full(DRAWS, math.nan)
    noise[0] = 0.0
    logs_D = curve.log_compute(curve.loss(base) + found.difference + found.error * noise) - math.log(own)
    return np.clip(logs_D, -MOST, MOST)


def told(logs_D: Floats) -> Estimate:
    """A multiplier from its logarithms."""
    ends = np.nanquantile(logs_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(*(math.exp(min(one, 700.0)) for one in (logs_D[0], *ends)))


def course(computes: Sequence[float], logs_RD: Sequence[Floats]) -> tuple[Estimate, Trend] | None:
    """Fits a line to ln m over ln C, weighted by the rungs' variances.

    Returns:
        A rung's multiplier over that of the rung below, and the trend; None for one rung.
    """
    found = _lines(computes, logs_RD)
    if found is None:
        return None
    factor = told(found[1] * STEP)
    if factor.low > 1 or factor.high < 1:
        return factor, "grows" if factor.low > 1 else "fades"
    return factor, "holds" if factor.low >= 1 - HOLDS and factor.high <= 1 + HOLDS else "unclear"


def _lines(computes: Sequence[float], logs_RD: Sequence[Floats]) -> tuple[Floats, Floats, float] | None:
    """Height at the mean, slope by draw, and the mean of ln C."""
    if len(computes) < 2:
        return None
    x_R, y_RD = np.log(computes), np.array(logs_RD)
    weights_R = 1 / np.maximum(np.nanvar(y_RD, axis=1), 1e-8)
    weights_R /= weights_R.sum()
    middle = float(weights_R @ x_R)
    height_D = weights_R @ y_RD
    slope_D = (weights_R * (x_R - middle)) @ y_RD / (weights_R @ np.square(x_R - middle))
    return height_D, slope_D, middle


def extrapolate(computes: Sequence[float], logs_RD: Sequence[Floats], to: float, spread: float) -> Floats:
    """ln m at a larger compute, predicted from the rungs below, by draw. A slope is shrunk towards 0, the multiplier
    that holds, by a normal prior that is wider for an idea that makes a larger difference."""
    generator = np.random.default_rng(SEED + 2)
    found = _lines(computes, logs_RD)
    height_D, slope_D, middle = found or (logs_RD[0], np.zeros(DRAWS), math.log(computes[0]))
    variance = math.inf if found is None else float(np.var(slope_D))
    prior = spread * (abs(float(height_D[0])) + SMALL)
    trust = prior**2 / (prior**2 + variance)
    noise = generator.standard_normal(DRAWS) * prior * math.sqrt(1 - trust)  # of the slope, given its estimate
    noise[0] = 0.0
    return height_D + (trust * slope_D[0] + noise) * (math.log(to) - middle)


def slope_spread(lines: Sequence[tuple[Sequence[float], Sequence[Floats]]]) -> float:
    """Standard deviation of the true slopes of ln m over ln C among ideas, as a share of |ln m| + SMALL, by moments; at
    least `LEAST_SPREAD`, since few ideas on two rungs tell little."""
    found = [one for computes, logs_RD in lines if (one := _lines(computes, logs_RD)) is not None]
    sizes = [abs(float(height_D[0])) + SMALL for height_D, _, _ in found]
    slopes = [float(slope_D[0]) / size for (_, slope_D, _), size in zip(found, sizes, strict=True)]
    noise = [float(np.var(slope_D)) / size**2 for (_, slope_D, _), size in zip(found, sizes, strict=True)]
    own = float(np.mean(np.square(slopes)) - np.mean(noise)) if found else 0.0
    return max(LEAST_SPREAD, math.sqrt(max(0.0, own)))


# The multipliers of a study ---------------------------------------------------------------------------------


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
    def judged(self) -> list[int]:
        """The rungs with a verdict or an interval, ascending: one or two pairs give neither."""
        return sorted(at for at, one in self.findings.items() if one.verdict == "fails" or one.interval[1] < math.inf)

    @property
    def course(self) -> tuple[Estimate, Trend] | None:
        return course(*self.line(self.flops))

    def line(self, rungs: Iterable[int]) -> tuple[list[float], list[Floats]]:
        """The computes and the multipliers of the rungs, among some, that have a multiplier; ascending."""
        kept = sorted(set(rungs) & set(self.flops))
        return [self.computes[rung] for rung in kept], [self.flops[rung] for rung in kept]


def rows(study: Comparison) -> list[Row]:
    """All ideas of a study, the largest multiplier on its highest rung first. There is none before the first look."""
    judgements = judgements_of(study)
    flops, seconds = (baseline_curve(study, axis) for axis in ("flops", "seconds"))
    found: list[Row] = []
    for idea in study.ideas:
        row = Row(idea, {rung: one.findings[idea] for rung, one in judgements.items() if idea in one.findings})
        for rung, finding in row.findings.items():
            base, own = finished(study, study.plan.base, rung), finished(study, idea, rung)
            if flops is None or finding.pairs < FIRST_LOOK:
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
    """The judgement on each rung that has trials of ideas, or of a baseline alone, beside those that tuned a field."""
    tuned = set(TUNE_SEEDS)
    judged_arms = study.ideas or [study.plan.base]
    rungs = {rung for (arm, rung, _), runs in study.trials.items() if arm in judged_arms and runs.keys() - tuned}
    return {rung: judged(study, rung) for rung in sorted(rungs & study.ngrams.keys())}


def baseline_curve(study: Comparison, axis: str, most: float = math.inf) -> Curve | None:
    """The baseline's loss over "flops" or "seconds", on the rungs up to `most`; None for fewer than two rungs with two
    seeds."""
    means: list[tuple[float, float, float]] = []
    for rung in map(int, study.plan.rungs):
        trials = finished(study, study.plan.base, rung)
        if len(trials) < 2 or rung > most:
            continue
        scores = base_scores(study, rung)
        compute = statistics.median(getattr(one, axis) for one in trials)
        means.append((compute, statistics.fmean(scores), statistics.stdev(scores) / math.sqrt(len(scores))))
    return Curve(means) if len(means) > 1 else None


def predictions(study: Comparison, found: Sequence[Row]) -> list[tuple[str, int, Estimate, float, bool]]:
    """Predicts each idea's multiplier on its highest rung from its multipliers below, all by the baseline's curve over
    every rung. The interval is the measurement's.

    Returns:
        For each idea: its name, the rung, the predicted multiplier, the measured one, and whether the interval has it.
    """
    made: list[tuple[str, int, Estimate, float, bool]] = []
    for row in found:
        if len(row.flops) < 2:
            continue
        *below, top = sorted(row.flops)
        if baseline_curve(study, "flops", most=below[-1]) is None:
            continue
        spread = slope_spread([one.line(below) for one in found])
        logs_D = extrapolate(*row.line(below), row.computes[top], spread)
        noise = np.random.default_rng(top).permutation(row.flops[top] - row.flops[top][0])
        noise[0] = 0.0
        predicted, measured = told(logs_D + noise), math.exp(float(row.flops[top][0]))
        made.append((row.idea, top, predicted, measured, predicted.low <= measured <= predicted.high))
    return made


Table = tuple[str, list[str], tuple[str, ...], list[list[str]]]  # title, lines of text, head and rows


def study_tables(study: Comparison) -> list[Table]:
    """Titled tables of a study: multipliers with their course, verdicts by rung, the test of the predictions."""
    found, judgements = rows(study), judgements_of(study)
    values = {arm: chosen(study, arm) for arm in study.arms}
    told_values = ", ".join(f"{arm} {value:g}" for arm, value in values.items() if value is not None)
    tables: list[Table] = []
    if found and len(judgements) > 1:
        head = ("idea", *(f"rung {rung}" for rung in judgements), "from rung to rung", "trend")
        body: list[list[str]] = []
        begun = [row for row in found if any(one.pairs >= FIRST_LOOK for one in row.findings.values())]
        for row in begun:
            cells = [str(told(row.flops[rung])) if rung in row.flops else "" for rung in judgements]
            factor, trend = row.course or ("", "")
            body.append([row.idea, *cells, str(factor), trend])
        waiting = [row.idea for row in found if row not in begun]
        few = [f"too few pairs so far: {', '.join(waiting)}"] if waiting else []
        tables.append(("Compute multipliers, by FLOPs", few, head, body))
    for rung, judgement in judgements.items():
        known = [(row, row.findings[rung]) for row in found if rung in row.findings]
        on_rung = sorted(known, key=lambda one: (not one[1].pairs, one[1].difference))
        head = ("idea", "pairs", "difference", "interval", "verdict", "multiplier by FLOPs", "by seconds")
        one = judgement.floor
        floor = f"{signed(one.difference)} {interval(one)}, {one.verdict}" if one else "not measured"
        noise = f"SD of a pair's difference {_measured(judgement.sd)}; A/A floor: {floor}"
        failed = [name for name in study.ideas if any(one.error for one in judged_trials(study, name, rung).values())]
        spent = [one.seconds for key, runs in study.trials.items() if key[1] == rung for one in runs.values()]
        middle, hours = statistics.median(spent), sum(spent) / 3600
        cost = f"{counted(len(spent), 'run')}, median {middle:,.0f} s, in all {hours:.1f} h"
        lines = [proxy_line(study, rung), noise, cost]
        lines += [f"{study.plan.tune}, chosen for each arm: {told_values}"] if told_values else []
        lines += [f"could not be trained: {', '.join(failed)}"] if failed else []
        body = [
            [row.idea, str(one.pairs), signed(one.difference), interval(one), one.verdict]
            + [str(told(logs[rung])) if rung in logs else "" for logs in (row.flops, row.seconds)]
            for row, one in on_rung
        ]
        tables.append((f"Rung {rung}", lines, head, body))
    if made := predictions(study, found):
        held = f"The interval holds for {sum(holds for *_, holds in made)} of {len(made)} ideas."
        body = [[idea, str(rung), str(predicted), f"{measured:.3f}"] for idea, rung, predicted, measured, _ in made]
        head = ("idea", "rung", "predicted", "measured")
        tables.append(("The highest rung, predicted from those below", [held], head, body))
    return tables


def study_lines(study: Comparison) -> list[str]:
    """The tables of a study as lines for the user."""
    return [line for title, told_, head, body in study_tables(study) for line in (title, *told_, *grid(head, body))]


def signed(value: float) -> str:
    """A difference in bits per byte as text; … for one that is not finite, as without a pair."""
    return f"{value:+.4f}" if math.isfinite(value) else "…"


def _measured(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "not measured"


def interval(finding: Finding) -> str:
    return f"[{', '.join(map(signed, finding.interval))}]"


def write_verdicts(study: Comparison) -> None:
    """Writes `verdicts.json`, which the board reads. It is derived from the records."""
    body: list[dict[str, Any]] = []
    for row in rows(study):
        for rung, one in row.findings.items():
            cell = {"idea": row.idea, "axis": f"steps, rung {rung}", "n": one.pairs, "mean": one.difference}
            low, high = one.interval
            body.append(strict({**cell, "low": low, "high": high, "verdict": one.verdict}))
    write_whole(study.folder / "verdicts.json", json.dumps(body, indent=1) + "\n")


# Calibration ------------------------------------------------------------------------------------------------


def known_answers(judgement: Judgement, answers: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """A row for each known answer: idea, answer, verdict, difference, and right, wrong, open or not measured."""
    rows = list[list[str]]()
    for idea, expected in answers.items():
        if (one := judgement.findings.get(idea)) is None:
            rows.append([idea, " or ".join(expected), "", "", "not measured"])
            continue
        right = not {one.verdict, one.verdict.removesuffix(", small")}.isdisjoint(expected)
        said = "right" if right else "open" if one.verdict == "undecided" else "wrong"
        rows.append([idea, " or ".join(expected), one.verdict, signed(one.difference), said])
    return rows


def usable(rows: Sequence[Sequence[str]]) -> str:
    """Says from the rows of `known_answers` how many a rung gets right, and whether it may judge."""
    right, still_open, unknown = map([row[-1] for row in rows].count, ("right", "open", "not measured"))
    others = "".join(f", {n} {name}" for n, name in ((still_open, "still open"), (unknown, "not measured")) if n)
    needed = FEWEST_RIGHT * len(rows)
    poor = "do not use it" if right + unknown < needed else "measure the others before it judges"
    return f"{right} of {len(rows)} known answers are right{others}: {'it may judge' if right >= needed else poor}"


def calibration(study: Comparison, rung: int, answers: Mapping[str, Sequence[str]]) -> list[str]:
    """Says how many known answers a rung gets right, its noise, and what it can find."""
    judgement = judged(study, rung)
    lines, scores = known_answers(judgement, answers), base_scores(study, rung)
    known = [one.correlation for one in judgement.findings.values() if math.isfinite(one.correlation)]
    spread = _measured(statistics.stdev(scores) if len(scores) > 1 else math.nan)
    told_ = [
        *grid(("idea", "known answer", "verdict", "difference", ""), lines),
        f"rung {rung}: {usable(lines)}",
        f"noise: SD of {len(scores)} seeds {spread} bits per byte, SD of a pair's difference "
        f"{_measured(judgement.sd)}, correlation of pairs {_measured(statistics.median(known or [math.nan]), 2)}",
    ]
    for pairs in (3, 5, 8, 12) if math.isfinite(judgement.sd) else ():
        rules = replace(study.plan, most_pairs=pairs)
        effect, delta = reach(judgement.sd, rules, max(1, len(study.ideas)), judgement.shared)
        told_.append(f"{pairs} pairs find an effect of {effect:.4f}, and can show a δ of {delta:.4f}")
    return told_
