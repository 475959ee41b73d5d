"""The results of a comparison, from its records: for each idea and axis an interval, a verdict, and the costs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quern.lab.evidence import Paired, Saved, compare_pairs, local_slope, share_saved, verdict, verdicts
from quern.lab.study import Study
from quern.records import strict
from quern.temporaries import write_whole

HEAD = (
    "idea",
    "steps",
    "pairs",
    "difference",
    "interval",
    "one look",
    "ρ",
    "verdict",
    "saved",
    "diverged",
    "tokens/s",
    "memory",
)
UNDECIDED = "undecided"
UNCHANGED = "changes nothing"
"""The verdict on an idea whose first pair is equal, bit for bit."""


@dataclass(frozen=True)
class Result:
    """An idea on one axis.

    Args:
        idea: Its name.
        axis: What the arms have equal.
        steps: Optimizer steps of the idea.
        seeds: The pairs' numbers.
        base_bpb: Of the baseline by pair; None for a run that diverged.
        idea_bpb: Of the idea by pair.
        paired: Difference idea − baseline, and its evidence.
        verdict: better, worse, no difference, undecided or changes nothing.
        saved: Share of the axis (steps, FLOPs or seconds) that the idea saves, with its interval; None if the
            baseline was not trained for other horizons.
        speed: Tokens per second over those of the baseline, in the pair whose arms alternated.
        memory: Peak memory over that of the baseline.
    """

    idea: str
    axis: str
    steps: int
    pairs: tuple[int, ...]
    base_bpb: tuple[float | None, ...]
    idea_bpb: tuple[float | None, ...]
    paired: Paired
    verdict: str
    saved: Saved | None
    speed: float
    memory: float

    @property
    def decided(self) -> bool:
        return self.verdict != UNDECIDED

    def line(self) -> str:
        """One line for the user."""
        if self.verdict == UNCHANGED:
            return f"  {self.idea}: the idea changes nothing here: both runs of its first pair are equal, bit for bit"
        return (
            f"  {self.idea}, equal {self.axis}: {self.paired.mean:+.4f} bits per byte "
            f"{_ends(self.paired.interval, '+.4f')} over {self.paired.n} pairs: {self.verdict}"
        )

    def cells(self) -> list[str]:
        """The cells of `HEAD`."""
        saved = "" if self.saved is None else f"{self.saved.share:+.0%} {_ends(self.saved.interval, '+.0%')}"
        correlation = "" if math.isnan(self.paired.correlation) else f"{self.paired.correlation:.2f}"
        return [
            self.idea,
            f"{self.steps:,}",
            str(self.paired.n),
            f"{self.paired.mean:+.4f}",
            _ends(self.paired.interval, "+.4f"),
            _ends(self.paired.fixed_interval, "+.4f"),
            correlation,
            self.verdict,
            saved,
            str(sum(self.paired.diverged) or ""),
            _percent(self.speed),
            _percent(self.memory),
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON types only; numbers that are not finite are None."""
        return strict(asdict(self))


def changes_nothing(study: Study, idea: str) -> bool:
    """Whether both runs of an idea's first pair are equal except in speed, so that further pairs would be too."""
    first, second = (
        one and (one.bpb, [point.bpb for point in one.curve], one.flops, one.parameters)
        for one in study.alternated(idea)
    )
    return first is not None and first == second and first[0] is not None


def steps_of(study: Study, idea: str, axis: str) -> int:
    """The steps with which an idea is trained on an axis, from its first pair; there, as many as the baseline."""
    steps = study.registration.steps
    base, ours = study.alternated(idea)
    if base is None or ours is None or base.bpb is None or ours.bpb is None:
        return steps
    if axis == "steps" or changes_nothing(study, idea):
        return steps
    if axis == "flops":
        return max(1, round(steps * base.flops / ours.flops))
    ratio = base.seconds / ours.seconds
    return steps if abs(ratio - 1) <= study.registration.same_time else max(1, round(steps * ratio))


def all_results(study: Study) -> list[Result]:
    """The results of a study so far, by idea and axis. On each axis the verdicts are corrected for all ideas."""
    registered = study.registration
    found: list[Result] = []
    for axis in registered.axes:
        on_axis = [one for idea in registered.ideas if (one := result(study, idea, axis))]
        corrected = verdicts([one.paired for one in on_axis], registered.delta, registered.alpha)
        found += [
            one if one.verdict == UNCHANGED else replace(one, verdict=verdict)
            for one, verdict in zip(on_axis, corrected, strict=True)
        ]
    order = {idea: number for number, idea in enumerate(registered.ideas)}
    return sorted(found, key=lambda one: order[one.idea])


def result(study: Study, idea: str, axis: str) -> Result | None:
    """The result of an idea on an axis, at level α / ideas; None without a single pair.

    It is that of the first pair with which it is decided: later pairs, trained for another axis, do not change it.
    """
    registered, steps = study.registration, steps_of(study, idea, axis)
    alpha = registered.alpha / len(registered.ideas)
    pairs: list[int] = []
    base_bpb: list[float | None] = []
    idea_bpb: list[float | None] = []
    unchanged = changes_nothing(study, idea)
    paired, found = None, UNDECIDED
    for pair in range(registered.most_pairs):
        base, ours = study.find(registered.base, pair, registered.steps), study.find(idea, pair, steps)
        if base is None or ours is None:
            continue
        pairs.append(pair)
        base_bpb.append(base.bpb)
        idea_bpb.append(ours.bpb)
        paired = compare_pairs(base_bpb, idea_bpb, alpha, registered.tau2)
        found = UNCHANGED if unchanged else verdict(paired, registered.delta, alpha)
        if found != UNDECIDED:
            break
    if paired is None:
        return None
    base, ours = (None, None) if unchanged else study.alternated(idea)  # a difference of their speed is noise
    return Result(
        idea=idea,
        axis=axis,
        steps=steps,
        pairs=tuple(pairs),
        base_bpb=tuple(base_bpb),
        idea_bpb=tuple(idea_bpb),
        paired=paired,
        verdict=found,
        saved=_saved(study, paired),
        speed=_ratio(ours and ours.tokens_per_second, base and base.tokens_per_second),
        memory=_ratio(ours and ours.peak_bytes, base and base.peak_bytes),
    )


def _ratio(ours: float | None, base: float | None) -> float:
    return ours / base if ours and base else math.nan


def _saved(study: Study, paired: Paired) -> Saved | None:
    """The difference as a share of the baseline's horizon, from its bits per byte at several horizons."""
    registered = study.registration
    lengths = sorted({registered.steps, *registered.other_lengths()})
    curves = []
    for pair in range(registered.horizon_pairs):
        found = [study.find(registered.base, pair, steps) for steps in lengths]
        curves.append([(math.log(one.steps), one.bpb) for one in found if one and one.bpb is not None])
    try:
        return share_saved(paired, local_slope(curves), paired.alpha)
    except ValueError:  # no pair has two lengths yet
        return None


def _percent(ratio: float) -> str:
    return "" if math.isnan(ratio) else f"{ratio - 1:+.1%}"


def _ends(ends: tuple[float, float], form: str) -> str:
    return f"[{', '.join(format(end, form) if math.isfinite(end) else '…' for end in ends)}]"


def write_results(study: Study, results: Sequence[Result]) -> None:
    """Writes `verdicts.json`, from which pages and the board read. It is derived from the records."""
    write_whole(study.folder / "verdicts.json", json.dumps([one.to_json() for one in results], indent=1) + "\n")
