"""Pace: names the rank that holds the others up, by the time that each computes by itself, its waiting left out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SLOW = 1.5
"""Times the median of the other ranks."""
STEPS_IN_A_ROW = 20


class Pace:
    """Fed with every rank's own seconds in each step; the same on all ranks."""

    def __init__(self, slow: float = SLOW, steps_in_a_row: int = STEPS_IN_A_ROW) -> None:
        self.slow, self.steps_in_a_row = slow, steps_in_a_row
        self._in_a_row: dict[int, int] = {}
        self._seconds: dict[int, float] = {}

    def observe(self, seconds: Sequence[float]) -> str | None:
        """seconds: this step's, by rank → a line for the user when a rank has been slow for so many steps in a row;
        once, until it has been fast again."""
        for rank, own in enumerate(seconds):
            usual = median([other for number, other in enumerate(seconds) if number != rank] or [own])
            slow = own > self.slow * usual
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if slow else 0
            self._seconds[rank] = self._seconds.get(rank, 0.0) + own / usual if slow else 0.0
            if self._in_a_row[rank] == self.steps_in_a_row:
                times = self._seconds[rank] / self.steps_in_a_row
                return (
                    f"rank {rank} is slow: over {self.steps_in_a_row} steps it computed {times:.1f} times as long as "
                    "the other ranks' median, and they wait for it: look what else runs there"
                )
        return None
