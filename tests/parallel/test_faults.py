"""Faults of a rank: all ranks exit soon, one line names the cause, and training continues or can be resumed.

Real commands on two ranks over gloo, in forked processes under an agent that acts like torchrun.
tests/laws/test_ranks_resume_law.py compares resumed runs with an undisturbed run.
"""

import itertools
import random
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quern.records import read_events, read_metrics
from quern.train import manifest
from quern.train.guard import EXIT_NOT_SAVED, EXIT_STOPPED
from quern.train.heartbeat import BEAT_SECONDS, STALE_BEATS
from tests.laws.table import Law
from tests.support.faulty_ranks import PRETRAIN, SHORT, FaultyRanks

ENDLESS = ("--train.steps", "100000", "--train.save-every", "50000")
"""For runs that must not end before the fault is noticed."""
STATED_SECONDS = 30
STOPPED_TIMEOUT_SECONDS = 3
CAMPAIGN_TIMES = 20  # of each fault, ten in each rank
Found = dict[str, Any]


class Runs:
    """Runs of the command above, each under its own name, with a fault in one of two ranks."""

    def __init__(self, server: FaultyRanks) -> None:
        self.server, self.names = server, map(str, itertools.count(1))

    def __call__(self, fault: dict[str, Any] | None = None, flags: Sequence[str] = SHORT, **more: Any) -> Found:
        return self.together([(fault, flags)], **more)[0]

    def together(self, runs: Sequence[tuple[dict[str, Any] | None, Sequence[str]]], **more: Any) -> list[Found]:
        """Makes one run for each fault and its flags, more ones of the command. `stage` in an answer: its records."""
        names, requests = [name for name, _ in zip(self.names, runs, strict=False)], []
        for name, (fault, flags) in zip(names, runs, strict=True):
            begin = PRETRAIN[3 if "--data" in flags else 1 :]  # one --data names all texts
            arguments = [PRETRAIN[0], *begin, *flags, "--run", name]
            requests.append({"arguments": arguments, "faults": [fault], **more})
        stages = [self.server.folder / f"out/runs/{name}/pretrain" for name in names]
        return [answer | {"stage": s} for answer, s in zip(self.server.together(requests), stages, strict=True)]


@pytest.fixture(scope="module")
def runs(faulty_server: FaultyRanks) -> Runs:
    return Runs(faulty_server)


@pytest.fixture(scope="module")
def untouched(runs: Runs) -> Found:
    """A run without faults, whose events are counted."""
    found = runs(counted=True)
    assert found["exits"] == [[0, 0]] and found["result"] == 0, found["said"]
    return found


@pytest.fixture(scope="module")
def events(untouched: Found) -> list[dict[str, Any]]:
    """The events of each part, by rank."""
    return [untouched["events"][str(rank)] for rank in range(2)]


def newest(stage: Path) -> dict[str, Any]:
    found = manifest.latest(stage / "checkpoints", pytest.fail)
    assert found is not None
    return found[1]


def lines_with(words: str, said: str) -> list[str]:
    return [line for line in said.splitlines() if words in line]


# Each fault, many times -------------------------------------------------------------------------------------


def during_training(events: dict[str, Any], stretch: float) -> int:
    """Returns an event between the starts of the second step and the last but two: signals are heard a step later."""
    first, last = events["begins"][1], events["begins"][-3]
    return int(first + stretch * (last - first))


def during_a_save(events: dict[str, Any], stretch: float) -> int:
    """Returns an event of the second or third of four equal saves."""
    return int(events["save"] * (0.3 + 0.4 * stretch))


def a_step(events: dict[str, Any], stretch: float) -> int:
    return 2 + int(stretch * (len(events["begins"]) - 2))


def check_killed(found: Found, rank: int, number: int) -> None:
    assert found["exits"][0][rank] == -signal.SIGKILL and found["exits"][0][1 - rank] not in (0, -signal.SIGKILL)
    assert found["seconds"] < STALE_BEATS * BEAT_SECONDS and found["result"] is None, found  # nobody waits for beats
    check_names_who_is_gone(found["said"], rank)


def check_stopped(found: Found, rank: int, number: int) -> None:
    assert 0 not in found["exits"][0] and found["result"] is None, found
    assert STOPPED_TIMEOUT_SECONDS < found["seconds"] < STOPPED_TIMEOUT_SECONDS + STATED_SECONDS, found
    check_names_who_is_gone(found["said"], rank)


def check_names_who_is_gone(said: str, rank: int) -> None:
    lines = lines_with("is gone or stopped, last seen", said)
    call = r"(in|after it began) [\w ]+ over \w+ \(its collective \d+ of the step\)"
    other = rf"rank {1 - rank} is (training|saving|evaluating), step \d+, {call}"
    line = rf"quern pretrain: rank {rank} is gone or stopped, last seen .+; {other}; all end"
    assert len(lines) == 1 and re.fullmatch(line, lines[0]) and "Traceback" not in said, said


def check_raised(found: Found, rank: int, number: int) -> None:
    assert found["exits"] == [[1, 1]] and found["seconds"] < STATED_SECONDS, found
    lines = lines_with("planted", found["said"])
    assert len(lines) == 1 and "is gone" not in found["said"], found["said"]
    assert re.fullmatch(rf"quern pretrain: rank {rank} failed in step \d+: ValueError: planted; all end", lines[0])


def check_asked_to_stop(found: Found, rank: int, number: int) -> None:
    assert found["exits"] == [[0, 0]] and found["result"] == EXIT_STOPPED, found
    assert newest(found["stage"])["step"] == read_metrics(found["stage"])[-1]["step"] < 12
    assert len(lines_with("as asked, and saved: continue with `quern", found["said"])) == 1, found["said"]


def check_without_agent(found: Found, rank: int, number: int) -> None:
    assert found["exits"] == [] and found["result"] is None, found
    assert found["seconds"] < STATED_SECONDS, found  # the time until no process was left
    assert len(lines_with("the process that started the ranks is gone", found["said"])) == 1, found["said"]


def check_disk(found: Found, rank: int, number: int) -> None:
    assert found["exits"] == [[0, 0]] and found["result"] == EXIT_NOT_SAVED, found
    assert len(lines_with("cannot write the checkpoint of step", found["said"])) == 1, found["said"]
    assert newest(found["stage"])["step"] >= 3


def check_not_finite(found: Found, rank: int, number: int) -> None:
    """If one rank had not skipped the step, no later step would be finite."""
    assert found["exits"] == [[0, 0]] and found["result"] == 0, found
    assert [event["step"] for event in read_events(found["stage"]) if event["kind"] == "skip"] == [number]
    assert [line for line in read_metrics(found["stage"]) if "loss" in line][-1]["skipped"] == 1


def check_slow(found: Found, rank: int, number: int) -> None:
    assert found["exits"] == [[0, 0]] and found["result"] == 0, found
    slow = [event["reason"] for event in read_events(found["stage"]) if event["kind"] == "slow"]
    assert len(slow) == 1 and slow[0].startswith(f"rank {rank} is slow: over 20 steps"), found["said"]
    assert slow[0] in found["said"]


@dataclass(frozen=True)
class Kind:
    """A fault of `faulty_ranks.py`: the check of its end, the part and event where it happens, the run's flags."""

    check: Callable[[Found, int, int], None]
    part: str = "train"
    number: Callable[[dict[str, Any], float], int] = during_training
    flags: Sequence[str] = SHORT


KINDS = {
    "kill": Kind(check_killed),
    "stop": Kind(check_stopped, flags=(*SHORT, "--timeout", str(STOPPED_TIMEOUT_SECONDS))),
    "raise": Kind(check_raised),
    "term": Kind(check_asked_to_stop),
    "agent": Kind(check_without_agent, flags=ENDLESS),
    "disk": Kind(check_disk, "save", during_a_save),
    "nan": Kind(check_not_finite, "a step", a_step),
    "slow": Kind(check_slow, "every step", a_step, ("--train.steps", "21", "--train.save-every", "21")),
}


def faults(name: str, times: int, seed: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """So many of this kind, alternating between the ranks from rank 1 on, each in its own stretch of the run."""
    kind, rng, made = KINDS[name], random.Random(f"{name} {seed}"), []
    for time in range(times):
        rank, stretch = (time + 1) % 2, (time + rng.random()) / times
        made.append({"kind": name, "rank": rank, "part": kind.part, "number": kind.number(events[rank], stretch)})
    return made


@pytest.fixture(scope="module")
def one_of_each(runs: Runs, events: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], Found]]:
    """A fault of each kind, and the run that had it. They run at the same time, except the slow one."""
    made = {name: faults(name, 1, 0, events)[0] for name in KINDS}
    together = [name for name in KINDS if name != "slow"]
    found = dict(zip(together, runs.together([(made[name], KINDS[name].flags) for name in together]), strict=True))
    found["slow"] = runs(made["slow"], KINDS["slow"].flags)
    return {name: (made[name], found[name]) for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_fault(name: str, one_of_each: dict[str, tuple[dict[str, Any], Found]]) -> None:
    fault, run = one_of_each[name]
    KINDS[name].check(run, fault["rank"], fault["number"])


@pytest.mark.campaign
@pytest.mark.parametrize("name", KINDS)
def test_fault_many_times(name: str, runs: Runs, events: list[dict[str, Any]], law: Law) -> None:
    made = faults(name, CAMPAIGN_TIMES, 1, events)
    found = runs.together([(fault, KINDS[name].flags) for fault in made])
    for fault, run in zip(made, found, strict=True):
        KINDS[name].check(run, fault["rank"], fault["number"])
    seconds = [one["seconds"] for one in found if one["seconds"] is not None]
    if seconds:
        law(f"{name}, {len(found)} times: seconds from the fault until no process is left", max(seconds), bar="< 35")


# Once each ---------------------------------------------------------------------------------------------------


def test_users_errors_are_said_once_and_not_tried_again(runs: Runs) -> None:
    for flags, words in (
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--tp", "3"], "--tp 3 does not divide 2 ranks: use one of [1, 2]"),
        (["--tp", "2", "--model.heads", "1"], ""),
    ):
        found = runs(flags=[*SHORT, *flags], restarts=1)
        assert found["exits"] == [[0, 0]] and found["result"] == 1, found
        assert len(lines_with("quern pretrain:", found["said"])) == 1 and "Traceback" not in found["said"]
        assert words in found["said"] and "rank" not in found["said"].replace("ranks", ""), found["said"]
