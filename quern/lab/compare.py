"""`quern lab compare`: ideas against a baseline over paired seeds, at equal steps, equal FLOPs and equal wall clock.

Both arms of a pair have the same seeds: the same order of the data, and the same initial weights where names and shapes
agree. In the first pair of an idea both arms alternate, which gives the ratio of their times. The number of steps with
equal FLOPs or equal time follows from that pair, and such trials are trained to the end of their own schedule. After
each pair an anytime-valid test decides (evidence.py), so a study may stop as soon as it is decided.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quern.lab.arms import Arm, Arms, Order
from quern.lab.cluster import RayArms
from quern.lab.results import Result, all_results, changes_nothing, result, steps_of, write_results
from quern.lab.study import Study


@dataclass(frozen=True)
class Workers:
    """Where arms run: `count` workers at a time, each with its own processes.

    Args:
        count: Ideas that are compared at the same time.
        out: The folder of tokenizers and token shards.
        machine: Arguments of `machine.detect` for each worker.
        variables: Environment variables of each worker's processes on this machine.
        cluster: Whether the workers run on the machines of a connected Ray cluster.
    """

    count: int
    out: Path
    machine: dict[str, Any]
    variables: Callable[[int], dict[str, str]] = lambda worker: {}
    cluster: bool = False

    def arms(self, number: int, arms: Mapping[str, Arm]) -> Arms | RayArms:
        """The processes of a worker."""
        if self.cluster:
            return RayArms(arms, self.out, self.machine)
        return Arms(arms, self.out, self.machine, self.variables(number))


def compare(
    study: Study, arms: Sequence[Arm], workers: Workers, log: Callable[[str], None]
) -> tuple[list[Result], list[str]]:
    """Trains what the study lacks until every idea is decided or has had its pairs.

    Args:
        study: Open. Finished trials are not trained again.
        arms: The baseline and the ideas.
        workers: Where the arms run.
        log: Takes lines for the user.

    Returns:
        The results of all ideas on all axes, and the ideas whose process failed.
    """
    driver = _Driver(study, log)
    by_name = {arm.name: arm for arm in arms}
    ideas = iter(study.registration.ideas)
    lock = threading.Lock()
    failed: list[str] = []

    def work(number: int) -> None:
        with workers.arms(number, by_name) as processes:
            while True:
                with lock:
                    idea = next(ideas, None)
                if idea is None:
                    return
                try:
                    driver.compare(idea, processes)
                except RuntimeError as error:  # the other ideas are still compared
                    failed.append(idea)
                    log(f"{idea} cannot be compared: {error}")
                    processes.end()

    if workers.count == 1:
        work(0)
    else:
        with ThreadPoolExecutor(workers.count) as pool:
            for done in [pool.submit(work, number) for number in range(workers.count)]:
                done.result()
    return all_results(study), failed


class _Driver:
    """Decides which trials come next, and keeps the records."""

    def __init__(self, study: Study, log: Callable[[str], None]) -> None:
        self.study, self.log = study, log
        self._writing = threading.Lock()
        self._base: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def compare(self, idea: str, processes: Arms | RayArms) -> None:
        """Trains pairs of an idea until it is decided on every axis."""
        registered = self.study.registration
        for pair in range(registered.most_pairs):
            decided = {one.axis for one in self._results(idea) if one.decided}
            undecided = [axis for axis in registered.axes if axis not in decided]
            if not undecided:
                break
            if pair == 0:
                self._first_pair(idea, processes)
            else:
                self._pair(idea, pair, {steps_of(self.study, idea, axis) for axis in undecided}, processes)
            if not changes_nothing(self.study, idea):
                self._other_lengths(idea, pair, undecided, processes)
            for line in dict.fromkeys(one.line() for one in self._results(idea)):
                self.log(line)
            with self._writing:
                write_results(self.study, all_results(self.study))  # the board shows them while the study runs

    def _results(self, idea: str) -> list[Result]:
        with self._writing:
            found = [result(self.study, idea, axis) for axis in self.study.registration.axes]
            return [one for one in found if one is not None]

    def _first_pair(self, idea: str, processes: Arms | RayArms) -> None:
        """The baseline and the idea alternate, also where the baseline was trained before: their times are compared."""
        registered = self.study.registration
        if self.study.alternated(idea)[0] is None:
            orders = [self._order(name, 0, registered.steps) for name in (registered.base, idea)]
            self._train(orders, processes)

    def _pair(self, idea: str, pair: int, lengths: set[int], processes: Arms | RayArms) -> None:
        """The baseline, unless it is trained, with the idea beside it if that needs as many steps."""
        registered = self.study.registration
        with self._base[pair]:
            if self.study.find(registered.base, pair, registered.steps) is not None:
                return
            wanted = registered.steps in lengths and self.study.find(idea, pair, registered.steps) is None
            names = [registered.base, idea] if wanted else [registered.base]
            self._train([self._order(name, pair, registered.steps) for name in names], processes)

    def _other_lengths(self, idea: str, pair: int, axes: list[str], processes: Arms | RayArms) -> None:
        """The idea with the steps of the other axes, which its first pair tells, and the baseline's other horizons."""
        registered = self.study.registration
        for axis in axes:
            self._alone(idea, pair, steps_of(self.study, idea, axis), processes)
        with self._base[pair]:
            for steps in registered.other_lengths() if pair < registered.horizon_pairs else ():
                self._alone(registered.base, pair, steps, processes)

    def _alone(self, arm: str, pair: int, steps: int, processes: Arms | RayArms) -> None:
        if self.study.find(arm, pair, steps) is None:
            self._train([self._order(arm, pair, steps)], processes)

    def _order(self, arm: str, pair: int, steps: int) -> Order:
        seed, data_seed = self.study.registration.seeds(pair)
        return Order(arm, pair, steps, seed, data_seed, evaluations=self.study.registration.evaluations)

    def _train(self, orders: list[Order], processes: Arms | RayArms) -> None:
        names = tuple(order.arm for order in orders)
        for order, trial in processes.train(orders):
            beside = tuple(name for name in names if name != order.arm)
            with self._writing:
                earlier = self.study.find(order.arm, order.pair, order.steps)
                self.study.add(order.pair, beside, trial)
            score = "diverged" if trial.bpb is None else f"{trial.bpb:.4f} bits per byte"
            self.log(
                f"pair {order.pair + 1}, {order.arm}: {order.steps:,} steps, {score}, "
                f"{trial.tokens_per_second:,.0f} tokens/s"
            )
            if earlier is not None and earlier.bpb != trial.bpb:
                self.log(f"note: {order.arm} does not repeat exactly with one seed: {earlier.bpb} before")
