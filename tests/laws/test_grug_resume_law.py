"""Law: the JAX twin, killed anywhere and resumed = the uninterrupted run, bit for bit.

Processes that run `quern grug train` are killed with SIGKILL: in the loop, in the thread that writes a checkpoint, or
while resuming; each resumed run is killed again. The test compares every logged line without its times, and every array
of the last checkpoint's state.
"""

import itertools
import random
import shlex
import signal
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from quern.train import manifest
from tests.laws.table import Law
from tests.support.jax_process import environment
from tests.support.line_server import LineServer
from tests.support.run_bench import logged
from tests.support.small_text import write_text

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

    def run(self, name: str, *more: str, ends: int = 0, **request: Any) -> dict[str, Any]:
        """ends: the exit code, unless SIGKILL arrives; request: as of tests/grug/runs.py."""
        plain = {"arguments": [*FLAGS, "--run", name, *more], "at": None, "sent": signal.SIGKILL, "counted": False}
        answer = self.ask(plain | request, gone={})
        died = answer.get("status") == -signal.SIGKILL and "at" in request
        assert died or answer.get("status") == ends, (answer, self.log())
        return answer

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(encoding="utf-8")[-3000:]

    def outcome(self, name: str) -> dict[str, Any]:
        """Logged lines without times, and every array of the newest state with its counters."""
        stage = self.folder / "out" / "runs" / name / "grug"
        newest = manifest.latest(stage / "checkpoints", pytest.fail)
        assert newest is not None
        meta = newest[1]["meta"]
        meta["state"].pop("seconds")
        (file,) = newest[0].glob("*.safetensors")
        state = {name: array.tobytes() for name, array in load_file(file).items()}
        return {"lines": logged(stage), "meta": meta, "state": state}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("grug-resume")) as made:
        yield made


def killed_and_resumed(forks: Bench, points: int, seed: int) -> int:
    """Kills chains of resumed runs at `points` seeded events; returns how many chains ended with another result."""
    reference, events = forks.reference
    expected = forks.outcome(reference)
    assert len(expected["lines"]) == 8 and len(expected["state"]) > 30
    rng, kills, wrong = random.Random(seed), 0, 0
    while kills < points:
        name = next(forks.names)
        for _ in range(min(5, points - kills)):
            # Resumed runs are shorter: an event after their end does not kill them.
            died = forks.run(name, "--resume", at=rng.randrange(1, events))["status"] != 0
            kills += died
            if not died:
                break
        forks.run(name, "--resume")
        wrong += forks.outcome(name) != expected
    return wrong


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("points", [3, pytest.param(100, marks=pytest.mark.campaign)])
def test_killed_and_resumed_is_uninterrupted(forks: Bench, law: Law, points: int) -> None:
    wrong = killed_and_resumed(forks, points, seed=0)
    law(f"JAX twin, killed at {points} points and resumed = uninterrupted", wrong == 0, "bit for bit")
    assert wrong == 0


def test_text_that_changed_is_refused_with_both_fingerprints(forks: Bench) -> None:
    (name, _), text = forks.reference, forks.folder / "text.jsonl"
    kept, before = text.read_text(encoding="utf-8"), forks.outcome(name)
    tokenizer = (forks.folder / "out" / "runs" / name / "tokenizer.json").read_bytes()
    text.write_text(kept + '{"text": "One more document."}\n', encoding="utf-8")
    forks.run(name, "--resume", "--train.steps", "15", ends=1)
    text.write_text(kept, encoding="utf-8")
    assert f"has changed since run '{name}' began with it (" in forks.log().splitlines()[-1]
    assert forks.outcome(name) == before
    assert (forks.folder / "out" / "runs" / name / "tokenizer.json").read_bytes() == tokenizer


def test_a_signal_saves_and_stops(forks: Bench) -> None:
    name, (_, events) = next(forks.names), forks.reference
    forks.run(name, at=events // 2, sent=signal.SIGTERM, ends=75)
    again = shlex.join(["quern", "grug", "train", *FLAGS, "--run", name, "--resume"])
    assert f"saved: continue with `{again}`" in forks.log()
    newest = manifest.latest(forks.folder / "out" / "runs" / name / "grug" / "checkpoints", pytest.fail)
    assert newest is not None and 0 < newest[1]["step"] < 12
