"""Law: ranks of which one dies, anywhere, and all start anew by themselves = the run that nobody touched.

Real commands on two ranks over gloo that die by SIGKILL, some in a save, some while they resume; or whose agent does,
after which the run is resumed by hand. Bit for bit, as in test_resume_law.py, with the same number of ranks.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quern.records import read_events, read_metrics
from quern.train.guard import EXIT_STOPPED
from tests.laws.table import Law
from tests.support.faulty_ranks import FaultyRanks
from tests.support.line_server import ENVIRONMENT
from tests.support.run_bench import PRETRAIN, differences
from tests.support.waiting import until

COMMAND = [*PRETRAIN, "--out", "out", "--no-compile", "--dtype", "fp32", "--threads", "1", "--timeout", "10"]


class Bench:
    def __init__(self, server: FaultyRanks) -> None:
        self.folder, self.server, self.count = server.folder, server, 0
        name, untouched = self.run([], counted=True)
        assert untouched["exits"] == [[0, 0]], untouched["said"]
        self.reference, self.events = self.stage(name), untouched["events"]

    def run(
        self, faults: list[dict[str, Any] | None], name: str = "", more: tuple[str, ...] = (), counted: bool = False
    ) -> Any:
        self.count += 1
        name = name or f"resumed-{self.count}"
        arguments = [*COMMAND, *more, "--run", name]
        return name, self.server(arguments, faults=faults, restarts=len(faults) + 2, counted=counted)

    def stage(self, name: str) -> Path:
        return self.folder / "out" / "runs" / name / "pretrain"

    def fault(self, rng: random.Random, kind: str, stretch: float) -> dict[str, Any]:
        part, rank = rng.choice(["train", "train", "save"]), rng.randrange(2)
        number = 1 + int(stretch * (self.events[str(rank)][part] - 1))  # rank 0 has more to do in a save
        return {"kind": kind, "rank": rank, "part": part, "number": number}

    def killed(self, kinds: tuple[str, ...], seed: int) -> tuple[list[str], list[str]]:
        """One run for each of `kinds`, which fails once at a point of its own stretch of the run, and where the ranks
        start anew by themselves, a second time somewhere → differences, places."""
        rng = random.Random(seed)
        found, places = [], []
        for number, kind in enumerate(kinds):
            first = self.fault(rng, kind, (number + rng.random()) / len(kinds))
            again = self.fault(rng, "kill", 0.4 * rng.random())
            name, answer = self.run([first, again] if kind == "kill" else [first])
            assert answer["places"], f"{first} never happened"
            places += answer["places"]
            if kind == "agent":
                assert answer["exits"] == [], answer  # nobody was left to note them
                name, answer = self.run([None], name, ("--resume",))
            assert answer["exits"][-1] == [0, 0] and answer["result"] == 0, (first, again, answer)
            found += [f"{name}, {first}: {one}" for one in differences(self.stage(name), self.reference)]
        return found, places


@pytest.fixture(scope="module")
def bench(faulty_server: FaultyRanks) -> Bench:
    return Bench(faulty_server)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kinds", "least"),
    [(("kill", "agent"), 3), pytest.param((*["kill"] * 4, "agent") * 12, 100, marks=pytest.mark.campaign)],
)
def test_killed_ranks_start_anew_as_if_nothing_had_happened(
    kinds: tuple[str, ...], least: int, bench: Bench, law: Law
) -> None:
    differing, places = bench.killed(kinds, seed=0)
    law(f"resumed = uninterrupted: 2 ranks, {len(places)} kills of a rank or their agent", differing)
    assert len(places) >= least, places


# From outside, with the real launcher -----------------------------------------------------------------------


def ranks_of(launcher: int) -> list[int]:
    """The processes that it has started and that are still there."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="utf-8").split()
    states = {int(child): Path(f"/proc/{child}/stat").read_text(encoding="utf-8") for child in children}
    return [child for child, state in states.items() if state.rpartition(")")[2].split()[0] != "Z"]


@pytest.mark.campaign
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc")
def test_a_rank_of_the_real_launcher_is_killed_and_the_launcher_stopped(bench: Bench, law: Law) -> None:
    """All start anew by themselves; SIGTERM to the launcher, which exits with 75; resumed, it ends as the run that
    nobody touched."""
    long, stage = ("--train.steps", "60", "--timeout", "60"), bench.stage("outside")
    _, untouched = bench.run([], "untouched", long)
    assert untouched["exits"] == [[0, 0]], untouched["said"]
    command = [sys.executable, "-m", "quern.cli.main", *COMMAND, *long, "--run", "outside", "--ranks", "2"]
    with subprocess.Popen(
        [*command, "--restarts", "3"], stdout=subprocess.PIPE, text=True, cwd=bench.folder, env=ENVIRONMENT
    ) as process:
        try:
            until(lambda: len(read_metrics(stage)) >= 9, 200)
            os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
            until(lambda: [event["kind"] for event in read_events(stage)].count("compile") == 2, 200)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == EXIT_STOPPED == 75
    _, answer = bench.run([], "outside", (*long, "--resume"))
    assert answer["exits"] == [[0, 0]], answer["said"]
    differing = differences(stage, bench.stage("untouched"), ignored="kept")
    law("resumed = uninterrupted: a rank killed, the launcher stopped, from outside", differing)
