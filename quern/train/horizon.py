"""`Horizon`: the number of steps of a run, planned again while it trains if it trains for a time (`train.minutes`).

A plan is (the step from which it holds, the steps of the whole run). From that step on, the rest of the
schedule is spread evenly over the remaining steps, so the rates of a step follow from the step and the earlier plans
alone. The plans are part of every checkpoint, and events of the stage: a resumed run repeats those that it recorded
after its checkpoint at the same steps. Seconds are time in steps (`TrainState.seconds`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quern.records import read_events

Plan = tuple[int, int]

CHECK_SHARE = 0.05
"""The plan is checked each time that this share of the time that was left at the check before is spent."""
TOLERANCE = 0.01
"""A plan holds while it is expected to miss the time by less than this share of it."""
TIMED_SHARE = 0.05
"""The speed is measured over the last steps: this share of the run."""


class Horizon:
    """The length of a run. Schedules, `every` and marks count in steps of its first plan; `decide` appends later plans.

    budget: seconds that the run may take (None keeps the first plan), of which it has spent some. recorded: plans that
    it made before it was interrupted.
    """

    def __init__(
        self, first: int, plans: list[Plan], budget: float | None, spent: float = 0.0, recorded: Sequence[Plan] = ()
    ) -> None:
        self.first, self.plans, self.budget = first, plans, budget
        self._recorded = dict(recorded)
        self._checked = spent
        self._times: deque[float] = deque(maxlen=max(8, round(TIMED_SHARE * first)))

    @property
    def steps(self) -> int:
        """Steps of the whole run, by the newest plan."""
        return self.plans[-1][1] if self.plans else self.first

    def place(self, step: int) -> float:
        """The step of the first plan at which the run has come as far as at `step`. It is whole until a later plan."""
        since, place, slope = 0, 0.0, 1.0
        for at, steps in self.plans:
            if at >= step:
                break
            since, place = at, place + slope * (at - since)
            slope = (self.first - place) / max(1, steps - at)
        return step if since == 0 else min(self.first, place + slope * (step - since))

    def due(self, step: int, every: int) -> bool:
        """Whether something that happens every so many steps of the first plan happens after this step."""
        return self.place(step) // every > self.place(step - 1) // every

    def reaches(self, mark: int | None, step: int) -> bool:
        """Whether `step` is the last one that is not beyond a mark, a step of the first plan."""
        return mark is not None and self.place(step) <= mark < self.place(step + 1)

    def observe(self, seconds: float) -> None:
        """Takes the time of a step."""
        self._times.append(seconds)

    def wanted(self, step: int, spent: float) -> int:
        """Checks the plan after `step` steps and `spent` seconds. Returns the steps of the whole run that fit into the
        time at the newest speed; 0 if the plan holds."""
        planned = self.steps - step
        if self.budget is None or not self._times or step < max(self._recorded, default=0):
            return 0
        if spent - self._checked < CHECK_SHARE * (self.budget - self._checked) and planned > 2:
            return 0
        self._checked, left = spent, self.budget - spent
        times = np.sort(self._times)
        each = times[len(times) // 4 : len(times) - len(times) // 4].mean()  # one long pause is no speed
        if abs(planned * each - left) <= TOLERANCE * self.budget:
            return 0
        return step + max(0, round(left / each))

    def decide(self, step: int, wanted: int) -> bool:
        """Plans again from `step` on, as recorded before or as wanted now. Returns whether the plan has changed."""
        steps = max(step, self._recorded.get(step) or wanted or self.steps)
        if steps == self.steps:
            return False
        self.plans.append((step, steps))
        return True


def recorded_plans(folder: Path) -> list[Plan]:
    """The plans of the run in a stage's folder: the ones that it repeated when it began last, and the later ones."""
    plans: list[Plan] = []
    for event in read_events(folder):
        if event["kind"] in ("start", "resume"):
            plans = [(step, steps) for step, steps in event.get("plans", [])]
        elif event["kind"] == "plan":
            plans.append((event["step"], event["steps"]))
    return plans
