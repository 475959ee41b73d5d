"""Law: ranks of which one dies, anywhere, and all start anew by themselves = the run that nobody touched.

Real commands on two ranks over gloo that die by SIGKILL, some in a save, some while they resume; or whose agent does,
after which the run is resumed by hand. Bit for bit, as in test_resume_law.py, with the same number of ranks.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.records import read_events, read_metrics
from quern.train.guard import EXIT_STOPPED
from tests.laws.table import Law
from tests.support.faulty_ranks import FaultyRanks
from tests.support.line_server import ENVIRONMENT
from tests.support.run_bench import PRETRAIN, differences

COMMAND = [*PRETRAIN, "--out", "out", "--no-compile", "--dtype", "fp32", "--threads", "1", "--timeout", "10"]
KINDS = ("kill", "kill", "kill", "kill", "agent")


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
        return name, self.server(arguments, faults, restarts=len(faults) + 2, counted=counted)

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
def test_killed_ranks_start_anew_as_if_nothing_had_happened(bench: Bench, law: Law) -> None:
    differing, places = bench.killed(("kill", "agent"), seed=0)
    law(f"resumed = uninterrupted: 2 ranks, {len(places)} kills of a rank or their agent", len(differing), "0")
    assert differing == [], places
    assert len(places) >= 3, places


@pytest.mark.campaign
def test_killed_ranks_100_times(bench: Bench, law: Law) -> None:
    differing, places = bench.killed(KINDS * 12, seed=1)
    law(f"resumed = uninterrupted: 2 ranks, {len(places)} kills of a rank or their agent", len(differing), "0")
    assert differing == [], places
    assert len(places) >= 100, places


# From outside, with the real launcher -----------------------------------------------------------------------


LONG = [*COMMAND, "--train.steps", "60", "--timeout", "60", "--restarts", "3"]


@contextlib.contextmanager
def begun(bench: Bench, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Its launcher; when the test leaves, it is gone, and its ranks with it."""
    with subprocess.Popen(
        [sys.executable, "-m", "quern.cli.main", *LONG, "--run", "outside", "--ranks", "2", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=bench.folder,
        env=ENVIRONMENT,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], there: Callable[[], bool]) -> None:
    until = time.monotonic() + 200
    while not there():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


def ranks_of(launcher: int) -> list[int]:
    """The processes that it has started and that are still there."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="utf-8")
    return [int(child) for child in children.split() if not gone(int(child))]


def compilations(stage: Path) -> int:
    return [event["kind"] for event in read_events(stage)].count("compile")


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.campaign
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc")
def test_the_real_launcher_and_its_ranks_killed_and_stopped(bench: Bench, law: Law) -> None:
    """A rank dies, and all start anew by themselves; SIGTERM to the launcher, which exits with 75; resumed by hand, the
    launcher itself dies, and its ranks with it; resumed once more, it ends as the run that nobody touched."""
    _, untouched = bench.run([], "untouched", ("--train.steps", "60"))
    assert untouched["exits"] == [[0, 0]], untouched["said"]
    stage = bench.stage("outside")
    with begun(bench) as process:
        wait_for(process, lambda: len(read_metrics(stage)) >= 9)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        wait_for(process, lambda: compilations(stage) == 2)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=200)[0]
    assert process.returncode == EXIT_STOPPED == 75, said
    assert said.count("is gone or stopped") == 1 and "Traceback" not in said, said

    with begun(bench, "--resume") as process:
        wait_for(process, lambda: compilations(stage) == 3)
        ranks = ranks_of(process.pid)
        process.kill()
        process.wait()
        until = time.monotonic() + 30
        while not all(gone(rank) for rank in ranks):
            assert time.monotonic() < until, "ranks without a launcher go on"
            time.sleep(0.05)
        assert len(ranks) == 2
    _, answer = bench.run([], "outside", ("--train.steps", "60", "--resume"))
    assert answer["exits"] == [[0, 0]], answer["said"]
    differing = differences(stage, bench.stage("untouched"), ignored="kept")
    law("resumed = uninterrupted: a rank killed, the launcher stopped, then killed, from outside", len(differing), "0")
    assert differing == []
