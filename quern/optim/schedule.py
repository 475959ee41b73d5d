"""Schedules: multipliers of the learning rates and of the decay.

Pure functions of (step, steps), where step counts from 0, and may be a fraction (train/horizon.py). `resolve.py`
derives the peak rates from batch, width and horizon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from quern.recipe import ResolvedTrain


class Multipliers(NamedTuple):
    """The factors that the schedule gives to one step."""

    lr: float = 1.0
    """Multiplies every group's peak rate."""
    momentum: float = 0.95
    """Muon's momentum itself; the default schedule leaves it as it is (Jordan et al. 2024)."""
    decay: float = 1.0
    """Multiplies Muon's weight decay (AdamW's decay follows its rate alone)."""
    progress: float = 1.0
    """Share of the run that is done; values that grow or anneal in a model follow it."""
    groups: Mapping[str, float] | None = None
    """Further factors of the rates of some groups, by group name; None is 1 for all of them."""


def learning_rate(
    step: float, steps: int, *, warmup_steps: int = 40, warmdown_share: float = 0.4, final: float = 0.05
) -> float:
    """Rises linearly over `warmup_steps`, stays at 1, then falls linearly over the last `warmdown_share` of the run to
    `final`, one step after the last. Where the ramps of a short run overlap, the lower one applies."""
    up = (step + 1) / warmup_steps if warmup_steps > 0 else 1.0
    length = warmdown_share * steps
    left = min(1.0, max(0.0, (steps - step) / length)) if length > 0 else 1.0
    return min(1.0, up, final + (1.0 - final) * left)


def weight_decay(step: float, steps: int) -> float:
    """Half a cosine from 1 at step 0 to 0 at `steps`."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))


def warmup_stable_decay(train: ResolvedTrain) -> Callable[[float], Multipliers]:
    """Returns the schedule of a resolved recipe: a function of the step, which counts from 0."""
    steps, warmup, share, final = train.steps, train.warmup_steps, train.warmdown_share, train.final_lr

    def multipliers(step: float) -> Multipliers:
        lr = learning_rate(step, steps, warmup_steps=warmup, warmdown_share=share, final=final)
        return Multipliers(lr=lr, decay=weight_decay(step, steps), progress=step / steps)

    return multipliers
