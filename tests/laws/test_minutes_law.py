"""Law: a run trains for the minutes that it was asked for, on a machine whose speed changes while it trains.

The loop trains a toy model by a simulated clock, on which a step takes what the machine of the test takes for it. The
first plan is right for the machine as it begins.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern import compiler
from quern.mesh import Mesh
from quern.records import Records, StageFolder, read_events, read_metrics
from quern.train.guard import EXIT_DONE
from quern.train.horizon import Horizon, recorded_plans
from quern.train.loop import Reporter, TrainingPlan, resume, train
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import TorchBackend
from tests.laws.table import Law
from tests.support.models import CPU
from tests.support.ranks import Ranks
from tests.support.toy_training import differing, snapshot, toy_loader, toy_plan, toy_recipe, toy_schedule, toy_state

pytestmark = pytest.mark.usefixtures("eager")

STEPS = 80
"""Steps of the first plan. A step takes a second at first, so this is the time asked for too."""
SMALL = toy_recipe({"width": 16, "windows": "L"})
_dice = random.Random(0)

MACHINES: dict[str, Callable[[float], float]] = {
    "is as measured": lambda share: 1.0,
    "halves at 10 %": lambda share: 1.0 if share < 0.1 else 2.0,
    "halves at 50 %": lambda share: 1.0 if share < 0.5 else 2.0,
    "halves at 90 %": lambda share: 1.0 if share < 0.9 else 2.0,
    "halves at 97 %": lambda share: 1.0 if share < 0.97 else 2.0,
    "doubles at 10 %": lambda share: 1.0 if share < 0.1 else 0.5,
    "doubles at 90 %": lambda share: 1.0 if share < 0.9 else 0.5,
    "was measured at half its speed": lambda share: 0.5,
    "halves and doubles in turns": lambda share: 1.0 + int(share * 10) % 2,
    "jitters by 30 %": lambda share: _dice.uniform(0.7, 1.3),
    "stands still once for 15 %": lambda share: 0.15 * STEPS if 0.4 <= share < 0.4 + 1 / STEPS else 1.0,
}
"""Seconds of a step, by the share of the time that is spent."""


def clock_of(step_seconds: Callable[[float], float]) -> Callable[[], float]:
    """A clock for the loop, which reads it before and after each step; it does not count the first step."""

    def readings() -> Iterator[float]:
        now = 0.0
        yield from (0.0, 100.0)
        while True:
            yield now
            now += step_seconds(now / STEPS)
            yield now

    return readings().__next__


def budgeted(steps: int = STEPS, seconds: float | None = STEPS, **changes: Any) -> TrainingPlan:
    shape = {"schedule": toy_schedule(steps), "micro_batch_rows": 8, "save_every": None, "budget_seconds": seconds}
    return toy_plan(steps, **{**shape, **changes})


def spent(path: Path, machine: str, plan: TrainingPlan) -> tuple[float, TrainState]:
    """Trains on a machine; returns the time spent, as a share of the time asked for, and the end."""
    _dice.seed(1)
    state = toy_state(SMALL)
    with StageFolder(path) as folder:
        clock = clock_of(MACHINES[machine])
        code = train(TorchBackend(state, CPU), toy_loader(), plan, folder, Reporter(print), clock=clock)
        assert code == EXIT_DONE
    return state.seconds / STEPS, state


@pytest.mark.parametrize("machine", MACHINES)
def test_the_time_spent_is_the_time_asked_for(machine: str, tmp_path: Path, law: Law) -> None:
    ratio, state = spent(tmp_path, machine, budgeted())
    law(f"time spent = train.minutes: the machine {machine}", ratio, bar="0.95 … 1.05")
    assert 0.95 <= ratio <= 1.05
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, state.step + 1))
    rates = [line["lr_multiplier"] for line in lines[STEPS // 20 :]]
    assert rates == sorted(rates, reverse=True), "the warm-down goes on from where it was"
    assert rates[-1] <= toy_schedule(STEPS)(STEPS - 6).lr, "the run ends at the end of its schedule"
    assert recorded_plans(tmp_path) == state.plans


def test_one_plan_fails_the_law(tmp_path: Path) -> None:
    """Without planning again, as `quern` did once."""
    assert spent(tmp_path, "halves at 10 %", budgeted(seconds=None))[0] > 1.8


def test_ranks_agree_by_the_clock_of_rank_0(ranks: Ranks, law: Law) -> None:
    (first, ratio, *facts), (second, _, *others) = ranks(2, "tests.laws.test_minutes_law:on_a_rank")
    assert first and first == second and facts == others
    law("time spent = train.minutes: 2 ranks, and the machine of rank 0 halves", ratio, bar="0.95 … 1.05")
    assert 0.95 <= ratio <= 1.05


def on_a_rank(mesh: Mesh) -> tuple[Any, ...]:
    """Trains as one of the ranks, whose clocks differ → plans, share of the time spent, steps, a weight."""
    compiler.set_eager(True)
    state = build_state(SMALL, CPU, build_model(SMALL, CPU, 0), mesh)
    slow = 3.0 * mesh.rank
    clock = clock_of(lambda share: slow + MACHINES["halves at 50 %"](share))
    code = train(TorchBackend(state, CPU), toy_loader(), budgeted(), Records(Path()), Reporter(print), clock=clock)
    assert code == EXIT_DONE
    return state.plans, state.seconds / STEPS, state.step, float(state.model.head.weight.double().sum())


class KilledError(Exception):
    """Ends a run in the middle of a step's work, as a kill would."""


def test_a_resumed_run_repeats_the_plans_that_it_recorded(tmp_path: Path, law: Law) -> None:
    """It dies before its last save, and resumes on a machine that would plan otherwise."""
    plan = budgeted(save_every=STEPS // 4)
    _, whole = spent(tmp_path / "whole", "halves and doubles in turns", plan)

    def dies(state: TrainState) -> dict[str, Any]:
        if state.step == whole.step:
            raise KilledError
        return {}

    with pytest.raises(KilledError):
        spent(tmp_path / "killed", "halves and doubles in turns", replace(plan, evaluators=[(1, dies)]))
    recorded = recorded_plans(tmp_path / "killed")
    ends = []
    for plans in (recorded, []):
        state = toy_state(SMALL)
        with StageFolder(tmp_path / "killed") as folder:
            assert resume(TorchBackend(state, CPU), folder.path / "checkpoints", print)
            assert 0 < state.step < recorded[-1][0], "it repeats steps at which it planned"
            clock = clock_of(lambda share: 0.25)
            again = replace(plan, recorded=plans, save_every=None)
            code = train(TorchBackend(state, CPU), toy_loader(), again, folder, Reporter(print), clock=clock)
            assert code == EXIT_DONE
        ends.append(differing(snapshot(state), snapshot(whole)))
    law("resumed = uninterrupted: train.minutes, on a machine of another speed", ends[0])
    assert ends[1] != [], "without the record, the steps that it repeats are others"
    assert [e["kind"] for e in read_events(tmp_path / "killed")].count("start") == 1


def test_what_a_plan_means() -> None:
    """By hand: 100 steps, planned to be 60 from step 20 on, then to be 90 from step 40 on."""
    horizon = Horizon(100, [(20, 60), (40, 90)], 1.0)
    assert [horizon.place(step) for step in (0, 7, 20, 30, 40, 50, 65, 90)] == [0, 7, 20, 40, 60, 68, 80, 100]
    assert horizon.steps == 90
    kept = [step for step in range(91) if horizon.reaches(35, step)]
    assert kept == [27], "the next one would be at 36"
    assert [step for step in range(1, 91) if horizon.due(step, 25)] == [23, 35, 59, 90]
    fixed = Horizon(100, [], None)
    for step, every in itertools.product(range(1, 101), (1, 7)):
        assert fixed.due(step, every) == (step % every == 0)
