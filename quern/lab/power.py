"""What the verdicts of evidence.py cost: which effects a number of pairs can find, and after how many pairs.

Simulated with a fixed seed, so the same numbers come out each time: STUDIES studies of one idea, normal
differences, one look after each pair, and a stop at the first verdict. Effects and margins are in standard deviations
of the differences of pairs, so the numbers hold for every score. `tables` writes the tables of docs/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quern.lab.evidence import TAU2, VERDICTS, Floats, Verdict, critical_t, decide, moments

STUDIES, SEED = 10_000, 13
EFFECTS = (3.0, 2.0, 1.5, 1.0, 0.75, 0.5)
MARGINS = (2.0, 1.5, 1.0, 0.75)
MOST_PAIRS = (5, 6, 8, 10, 15, 20, 30)
ALPHAS = (0.05, 0.01)


def _noise(most_pairs: int) -> Floats:
    """Standard normal differences [study, pair]."""
    return np.random.default_rng(SEED).standard_normal((STUDIES, most_pairs))


@dataclass(frozen=True)
class Price:
    """How studies of one true effect end."""

    effect: float
    """True mean difference in SDs; below 0 the idea is better."""
    shares: dict[Verdict, float]
    """Share of the studies that end with each verdict; `undecided` after the most pairs."""
    pairs: float
    """Mean number of pairs until the verdict, or until the most pairs."""


def first_decision(verdict_codes_SN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first verdict of each study that is not `undecided`, with its number of pairs; else the last of both."""
    decided = verdict_codes_SN > 0
    at = np.where(decided.any(-1), decided.argmax(-1), decided.shape[-1] - 1)
    return np.take_along_axis(verdict_codes_SN, at[:, None], -1)[:, 0], at + 1


def _simulate(
    effect: float, most_pairs: int, alpha: float, delta: float = 0.0, tau2: float = TAU2
) -> tuple[np.ndarray, np.ndarray]:
    """Code of the last verdict, and number of pairs, of each study."""
    n, mean, sd = moments(effect + _noise(most_pairs))
    return first_decision(decide(n[:, None], mean[..., None], sd[..., None], delta, alpha, tau2)[..., 0])


def price(effect: float, most_pairs: int, alpha: float, delta: float = 0.0, tau2: float = TAU2) -> Price:
    """Simulates studies of one idea with this true effect and margin, both in SDs of the differences."""
    ends, pairs = _simulate(effect, most_pairs, alpha, delta, tau2)
    shares: dict[Verdict, float] = {name: float(np.mean(ends == code)) for code, name in enumerate(VERDICTS)}
    return Price(effect, shares, float(pairs.mean()))


def detectable_effect(most_pairs: int, alpha: float, power: float = 0.8, tau2: float = TAU2) -> float:
    """Smallest effect, in SDs of the differences, that a share `power` of the studies finds by `most_pairs` pairs.

    Infinite if so few pairs cannot decide at all. For one of several ideas, divide alpha by their number.
    """
    n, mean, sd = moments(_noise(most_pairs))
    with np.errstate(invalid="ignore"):  # the SD of one difference
        needed = critical_t(n, alpha, tau2) * sd / np.sqrt(n) + mean  # the improvement with which each look decides
    least = np.where(np.isnan(needed), math.inf, needed).min(-1)
    return float(np.quantile(least, power, method="higher"))


def tables() -> str:
    """The tables of power and price in docs/statistics.md, as Markdown."""
    most = MOST_PAIRS[-1]
    parts = [
        f"Smallest effect that {0.8:.0%} of the studies find, in SDs of the differences:",
        _table(
            ["most pairs", *map(str, MOST_PAIRS)],
            [[f"α {alpha:g}", *(_number(detectable_effect(pairs, alpha)) for pairs in MOST_PAIRS)] for alpha in ALPHAS],
        ),
        f"Share of the studies that find an effect by 10, 20 and {most} pairs, and the mean number of pairs of a\n"
        f"study that stops at its verdict or at {most} pairs:",
        _table(
            ["effect in SDs", *(f"{text}, α {alpha:g}" for alpha in ALPHAS for text in ("found", "pairs"))],
            [[f"{effect:g}", *(cell for alpha in ALPHAS for cell in _found(effect, alpha))] for effect in EFFECTS],
        ),
        f"Share of the studies of an idea without effect that end as `no difference` by {most} pairs, and the mean\n"
        "number of pairs:",
        _table(
            ["δ in SDs", *(f"{text}, α {alpha:g}" for alpha in ALPHAS for text in ("shown", "pairs"))],
            [[f"{delta:g}", *(cell for alpha in ALPHAS for cell in _same(delta, alpha))] for delta in MARGINS],
        ),
    ]
    return "\n\n".join(parts)


def _found(effect: float, alpha: float) -> tuple[str, str]:
    ends, pairs = _simulate(-effect, MOST_PAIRS[-1], alpha)
    found = pairs[ends == VERDICTS.index("better")]
    return " / ".join(f"{(found <= by).sum() / STUDIES:.0%}" for by in (10, 20, MOST_PAIRS[-1])), f"{pairs.mean():.1f}"


def _same(delta: float, alpha: float) -> tuple[str, str]:
    found = price(0.0, MOST_PAIRS[-1], alpha, delta)
    return f"{found.shares['no difference']:.0%}", f"{found.pairs:.1f}"


def _number(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
