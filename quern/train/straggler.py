"""Pace: names the rank that holds the others up, by the time that each computes by itself, its waiting left out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SLOW = 1.5
"""Times the median of the other ranks."""
WINDOW_STEPS = 20
"""Summed over, since single steps differ for many reasons."""


class Pace:
    """Fed with every rank's own seconds in each step; the same on all ranks."""

    def __init__(self, slow: float = SLOW, window_steps: int = WINDOW_STEPS) -> None:
        self.slow, self.window_steps = slow, window_steps
        self._steps = 0
        self._sums: list[float] = []
        self._named: set[int] = set()

    def observe(self, seconds: Sequence[float]) -> str | None:
        """seconds: this step's, by rank → a line for the user when a window ends in which a rank was slow that was
        not in the window before."""
        self._sums = [before + own for before, own in zip(self._sums or [0.0] * len(seconds), seconds, strict=True)]
        self._steps += 1
        if self._steps < self.window_steps:
            return None
        times = [own / median(self._sums[:rank] + self._sums[rank + 1 :]) for rank, own in enumerate(self._sums)]
        slow = {rank for rank, ratio in enumerate(times) if ratio > self.slow}
        lines = [
            f"rank {rank} is slow: over {self._steps} steps it computed {times[rank]:.1f} times as long as the other "
            "ranks' median, and they wait for it: look what else runs there"
            for rank in sorted(slow - self._named)
        ]
        self._named, self._sums, self._steps = slow, [], 0
        return "; ".join(lines) or None
