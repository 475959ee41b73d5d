"""The values of the log: `line` computes them, and curves say how a report draws them.

Validation and reinforcement learning log values of their own (`Evaluator` in loop.py); here they only have curves. The
file imports no tensors, so a report reads it without them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Curve:
    """A curve of the report. key: the value of the log; points: mark each measurement; smooth: draw a running mean;
    median: report it, not the last value."""

    key: str
    title: str
    unit: str
    against: str = "step"
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


def counts(run: Any) -> dict[str, float]:
    """The counts with which every line begins. run: `Counters` of state.py."""
    return {"step": run.step, "tokens": run.tokens, "flops": run.flops.total, "seconds": round(run.seconds, 4)}


def line(run: Any, last: Any, window: Window, lr: float, peak_flops: float) -> dict[str, float]:
    """Computes a line of the log.

    run: `Counters` of state.py; last: the last `StepResult` of step.py; window: the timed steps since the last line;
    lr: the multiplier of the learning rates in the last step; peak_flops: peak FLOPs of the machine per second.
    """
    loss = run.unlogged_nats / run.unlogged_tokens if run.unlogged_tokens else last.loss  # since the last line
    found = counts(run) | {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}  # e^710 overflows
    if window.seconds:
        found["tokens_per_second"] = round(window.positions / window.seconds, 1)
        found["mfu"] = round(window.flops / window.seconds / peak_flops, 4)
    found |= {"lr_multiplier": lr, "grad_norm": last.grad_norm}
    return found | ({"skipped": run.guard.skips} if run.guard.skips else {})


_LOSS = Curve("loss", "Training loss", "nats per token", smooth=True, log=True)
_BITS = Curve("val_bpb", "Validation", "bits per byte", "tokens", points=True, log=True)
_NORM = Curve("grad_norm", "Gradient norm", "global", smooth=True, log=True)
CURVES = (
    _LOSS,
    replace(_LOSS, against="seconds"),
    _BITS,
    replace(_BITS, against="seconds"),
    Curve("tokens_per_second", "Throughput", "tokens per second", "seconds", median=True),
    Curve("mfu", "Model FLOPs utilisation", "of the peak", "seconds", share=True, median=True),
    Curve("lr_multiplier", "Learning rate", "relative to the peak"),
    _NORM,
)
RL_CURVES = (
    Curve("reward", "Reward", "mean of a step's replies", smooth=True),
    Curve("reward_std", "Spread of rewards", "standard deviation", smooth=True),
    Curve("val_pass_1", "Held-out questions", "pass@1", points=True, share=True),
    Curve("val_kl", "Divergence from the first model", "nats per token", points=True),
    Curve("entropy", "Entropy", "nats per token", smooth=True),
    Curve("reply_tokens", "Length of replies", "tokens", smooth=True),
    Curve("dropped", "Questions without a difference in reward", "of all", smooth=True, share=True),
    Curve("truncated", "Replies cut at the limit", "of all", smooth=True, share=True),
    _NORM,
)
