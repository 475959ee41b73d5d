"""Law: the JAX twin, killed anywhere and resumed = the uninterrupted run, bit for bit.

Processes that run `quern grug train` are killed with SIGKILL: in the loop, in the thread that writes a checkpoint, or
while resuming; each resumed run is killed again. The test compares every logged line without its times, and every array
of the last checkpoint's state.
"""

import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from quern.records import read_metrics
from quern.train import manifest
from tests.support.jax_process import environment
from tests.support.line_server import LineServer
from tests.support.small_text import write_text

Law = Callable[[str, float | int | str, str], None]
TIMED = {"seconds", "tokens_per_second", "mfu"}
FLAGS = """--data text.jsonl --depth 1 --text.vocab-size 320 --model.width 32 --model.head-dim 16 --model.context 32
 --train.batch-tokens 128 --train.micro-batch-tokens 64 --train.steps 12 --optim.lr-scale 0.3 --train.log-every 2
 --train.eval-every 6 --train.save-every 3 --out out --dtype fp32""".split()


class Bench(LineServer):
    """A folder with a small text and the runs of a test, and the process that forks the runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, (f"run-{number}" for number in itertools.count())
        write_text(folder)
        env = environment(folder / "compiled", devices=1)
        super().__init__(["-m", "tests.grug.runs", str(folder / "log.txt")], folder, env)

    @cached_property
    def reference(self) -> tuple[str, int]:
        """The name of a run that nothing disturbs, and how many events it has."""
        name = next(self.names)
        return name, self.run(name, counted=True)["events"]

    def run(
        self, name: str, *more: str, kill: int | None = None, counted: bool = False, refused: bool = False
    ) -> dict[str, Any]:
        request = {"arguments": [*FLAGS, "--run", name, *more], "kill": kill, "counted": counted}
        answer = self.ask(request, gone={})
        log = (self.folder / "log.txt").read_text(encoding="utf-8")[-3000:]
        assert answer.get("status") == int(refused) or (kill and answer.get("status") == -signal.SIGKILL), (answer, log)
        return answer

    def outcome(self, name: str) -> dict[str, Any]:
        """Logged lines without times, and the bytes of the newest state with its counters."""
        stage = self.folder / "out" / "runs" / name / "grug"
        lines = [{k: v for k, v in line.items() if k not in TIMED} for line in read_metrics(stage)]
        newest = manifest.latest(stage / "checkpoints", pytest.fail)
        assert newest is not None
        meta = newest[1]["meta"]
        meta["state"].pop("seconds")
        return {"lines": lines, "meta": meta, "state": state_bytes(newest[0])}


def state_bytes(path: Path) -> dict[str, bytes]:
    """Every array of a checkpoint's state by name, as safetensors itself reads them."""
    (file,) = path.glob("*.safetensors")
    return {name: array.tobytes() for name, array in load_file(file).items()}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("grug-resume")) as made:
        yield made


def killed_and_resumed(bench: Bench, points: int, seed: int) -> int:
    """Kills chains of resumed runs at `points` seeded events; returns how many chains ended with another result."""
    reference, events = bench.reference
    expected = bench.outcome(reference)
    assert len(expected["lines"]) == 8 and len(expected["state"]) > 30
    rng, kills, wrong = random.Random(seed), 0, 0
    while kills < points:
        name = next(bench.names)
        for _ in range(min(5, points - kills)):
            # Resumed runs are shorter: an event after their end does not kill them.
            died = bench.run(name, "--resume", kill=rng.randrange(1, events))["status"] != 0
            kills += died
            if not died:
                break
        bench.run(name, "--resume")
        wrong += bench.outcome(name) != expected
    return wrong


@pytest.mark.timeout(900)
def test_killed_and_resumed_is_uninterrupted(bench: Bench, law: Law) -> None:
    wrong = killed_and_resumed(bench, points=3, seed=0)
    law("JAX twin, killed at 3 points and resumed = uninterrupted", wrong == 0, "bit for bit")
    assert wrong == 0


def test_text_that_changed_is_refused_with_both_fingerprints(bench: Bench) -> None:
    (name, _), text = bench.reference, bench.folder / "text.jsonl"
    kept, before = text.read_text(encoding="utf-8"), bench.outcome(name)
    tokenizer = (bench.folder / "out" / "runs" / name / "tokenizer.json").read_bytes()
    text.write_text(kept + '{"text": "One more document."}\n', encoding="utf-8")
    bench.run(name, "--resume", "--train.steps", "15", refused=True)
    text.write_text(kept, encoding="utf-8")
    said = (bench.folder / "log.txt").read_text(encoding="utf-8").splitlines()[-1]
    assert f"has changed since run '{name}' began with it (" in said
    assert bench.outcome(name) == before
    assert (bench.folder / "out" / "runs" / name / "tokenizer.json").read_bytes() == tokenizer


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_killed_at_a_hundred_points(bench: Bench, law: Law) -> None:
    wrong = killed_and_resumed(bench, points=100, seed=1)
    law("JAX twin, killed at 100 points and resumed = uninterrupted", wrong == 0, "bit for bit")
    assert wrong == 0


def test_a_run_that_forgets_its_moments_is_noticed(bench: Bench) -> None:
    """The comparison can fail: a byte of one moment differs."""
    name, _ = bench.reference
    outcome = bench.outcome(name)
    moment = next(name for name in outcome["state"] if "momentum" in name)
    changed = bytes([outcome["state"][moment][0] ^ 1]) + outcome["state"][moment][1:]
    assert outcome | {"state": outcome["state"] | {moment: changed}} != bench.outcome(name)


def test_a_signal_saves_and_stops(bench: Bench) -> None:
    folder = bench.folder
    command = [
        sys.executable,
        "-m",
        "quern.cli.main",
        "grug",
        "train",
        *FLAGS,
        "--run",
        "stopped",
        "--train.steps",
        "100000",
    ]
    with subprocess.Popen(
        command, cwd=folder, env=environment(folder / "compiled", 1), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("training:"):
                break
        events = folder / "out" / "runs" / "stopped" / "grug" / "events.jsonl"
        while process.poll() is None and '"compile"' not in events.read_text(encoding="utf-8"):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 75, rest
    assert "saved: continue with `quern grug train --resume --run stopped`" in rest
    assert manifest.latest(events.parent / "checkpoints", pytest.fail) is not None
