"""The values of the log, each defined once: its name, how it is computed, and how a report draws it.

Validation and reinforcement learning log values of their own (`Evaluator` in loop.py); here they only have curves. The
file imports no tensors, so a report reads it without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Curve:
    """A curve of the report. points: mark each measurement; smooth: draw a running mean; median: report it, not the
    last value; key: of the log, which a metric fills in for its own curves."""

    title: str
    unit: str
    against: str = "step"
    key: str = ""
    points: bool = False
    smooth: bool = False
    log: bool = False
    share: bool = False
    median: bool = False


@dataclass
class Window:
    """The steps that were timed since the last line. earlier: tokens per second of the lines before."""

    earlier: float | None = None
    positions: int = 0
    flops: float = 0
    seconds: float = 0.0

    def add(self, result: Any, seconds: float) -> None:
        """Adds a step (`StepResult`)."""
        self.seconds += seconds
        self.positions += result.positions
        self.flops += result.flops.model

    def rate(self) -> float | None:
        """Tokens per second, once a step was timed."""
        return self.positions / self.seconds if self.seconds else self.earlier

    def speed(self) -> dict[str, float]:
        """The same, as a line for the user has it."""
        rate = self.rate()
        return {} if rate is None else {"tokens_per_second": rate}


@dataclass(frozen=True)
class Moment:
    """The values that a line of the log is computed from.

    run: `Counters` of state.py; last: the last `StepResult` of step.py; window: the timed steps since the last line;
    lr: the multiplier of the learning rates in the last step; peak_flops: the machine's, per second.
    """

    run: Any
    last: Any
    window: Window
    lr: float
    peak_flops: float

    @property
    def loss(self) -> float:
        """The mean over the targets since the last line."""
        return self.run.unlogged_nats / self.run.unlogged_tokens if self.run.unlogged_tokens else self.last.loss


@dataclass(frozen=True)
class Metric:
    """A value of the log. of: computes it, or returns None to leave it out of a line."""

    name: str
    of: Callable[[Moment], float | None] = lambda now: None
    curves: tuple[Curve, ...] = ()


def _perplexity(now: Moment) -> float:
    return math.exp(now.loss) if now.loss < 700 else math.inf  # e^710 exceeds a float


def _rate(now: Moment) -> float | None:
    return round(now.window.positions / now.window.seconds, 1) if now.window.seconds else None


def _mfu(now: Moment) -> float | None:
    window = now.window
    return round(window.flops / window.seconds / now.peak_flops, 4) if window.seconds else None


_LOSS = Curve("Training loss", "nats per token", smooth=True, log=True)
_BITS = Curve("Validation", "bits per byte", points=True, log=True)
_NORM = Curve("Gradient norm", "global", smooth=True, log=True)
METRICS = (
    Metric("step", lambda now: now.run.step),
    Metric("tokens", lambda now: now.run.tokens),
    Metric("flops", lambda now: now.run.flops.total),
    Metric("seconds", lambda now: round(now.run.seconds, 4)),
    Metric("loss", lambda now: now.loss, (_LOSS, replace(_LOSS, against="seconds"))),
    Metric("perplexity", _perplexity),
    Metric("val_bpb", curves=(replace(_BITS, against="tokens"), replace(_BITS, against="seconds"))),
    Metric("tokens_per_second", _rate, (Curve("Throughput", "tokens per second", "seconds", median=True),)),
    Metric("mfu", _mfu, (Curve("Model FLOPs utilisation", "of the peak", "seconds", share=True, median=True),)),
    Metric("lr_multiplier", lambda now: now.lr, (Curve("Learning rate", "relative to the peak"),)),
    Metric("grad_norm", lambda now: now.last.grad_norm, (_NORM,)),
    Metric("skipped", lambda now: now.run.guard.skips or None),
)
RL_METRICS = (
    Metric("reward", curves=(Curve("Reward", "mean of a step's replies", smooth=True),)),
    Metric("reward_std", curves=(Curve("Spread of rewards", "standard deviation", smooth=True),)),
    Metric("val_pass_1", curves=(Curve("Held-out questions", "pass@1", points=True, share=True),)),
    Metric("val_kl", curves=(Curve("Divergence from the first model", "nats per token", points=True),)),
    Metric("entropy", curves=(Curve("Entropy", "nats per token", smooth=True),)),
    Metric("reply_tokens", curves=(Curve("Length of replies", "tokens", smooth=True),)),
    Metric("dropped", curves=(Curve("Questions without a difference in reward", "of all", smooth=True, share=True),)),
    Metric("truncated", curves=(Curve("Replies cut at the limit", "of all", smooth=True, share=True),)),
    Metric("grad_norm", curves=(_NORM,)),
)


def line(now: Moment) -> dict[str, float]:
    """Computes a line of the log."""
    found = {metric.name: metric.of(now) for metric in METRICS}
    return {name: value for name, value in found.items() if value is not None}


def curves(metrics: tuple[Metric, ...]) -> list[Curve]:
    """The curves of a report, in their order."""
    return [replace(curve, key=metric.name) for metric in metrics for curve in metric.curves]
