"""Faults of a rank: everyone ends, soon, with the cause named once, and training goes on or can go on.

Real commands on two ranks over gloo, in forked processes under an agent that does what torchrun does; and once each
through the real launcher, from outside. What is resumed afterwards is held against the run that nobody touched by
tests/laws/test_ranks_resume_law.py.
"""

import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.records import read_events, read_metrics
from quern.text import tinyworld
from quern.train import checkpoint
from quern.train.guard import EXIT_NOT_SAVED, EXIT_STOPPED
from quern.train.pace import Pace
from tests.parallel.faulty_ranks import FaultyRanks, faulty

ROOT = Path(__file__).parents[2]
PRETRAIN = """pretrain --data text.jsonl --depth 2 --text.vocab-size 320 --model.width 32 --model.head-dim 16
 --model.kv-heads 1 --model.context 48 --train.batch-tokens 192 --train.micro-batch-tokens 144 --optim.lr-scale 0.3
 --train.log-every 1 --train.eval-every 8 --out out --no-compile --dtype fp32 --threads 1""".split()
SHORT = ["--train.steps", "23", "--train.save-every", "5"]
STATED_SECONDS = 30
TIMEOUT_SECONDS = 10
TIMES, CAMPAIGN_TIMES = 2, 20


def write_text(folder: Path) -> None:
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in tinyworld.documents(0, 0.003, "train"))


class Runs:
    """Runs of the command above, each under a name of its own, with what goes wrong in one of two ranks."""

    def __init__(self, folder: Path, server: FaultyRanks) -> None:
        self.folder, self.server, self.count = folder, server, 0

    def __call__(self, kind: str = "", rank: int = 0, part: str = "", number: int = 0, **more: Any) -> dict[str, Any]:
        """`stage` is where it left its records. flags: further ones of the command."""
        self.count += 1
        fault = {"kind": kind, "rank": rank, "part": part, "number": number} if kind else None
        flags = [*more.pop("flags", SHORT), "--timeout", str(TIMEOUT_SECONDS), "--run", str(self.count)]
        return self.server([*PRETRAIN, *flags], [fault], **more) | {
            "stage": self.folder / f"out/runs/{self.count}/pretrain"
        }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("faults")
    write_text(folder)
    with faulty(folder) as server:
        yield Runs(folder, server)


@pytest.fixture(scope="module")
def events(runs: Runs) -> dict[str, int]:
    """How many of each part a rank has that nothing befalls."""
    untouched = runs()
    assert untouched["exits"] == [[0, 0]] and untouched["result"] == 0, untouched["said"]
    return untouched["events"]["1"]


def drawn(seed: int, count: int) -> tuple[int, int]:
    """A rank, and one of the later three quarters of its events: beyond the first step."""
    rng = random.Random(seed)
    return rng.randrange(2), int(count * rng.uniform(0.25, 0.95))


def newest(stage: Path) -> dict[str, Any]:
    found = checkpoint.latest(stage / "checkpoints", pytest.fail)
    assert found is not None
    return found[1]


def header_and_data(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def lines_with(words: str, said: str) -> list[str]:
    return [line for line in said.splitlines() if words in line]


@pytest.fixture(params=range(TIMES))
def seed(request: pytest.FixtureRequest) -> int:
    return request.param


def check_killed(runs: Runs, events: dict[str, int], seed: int) -> None:
    rank, number = drawn(seed, events["train"])
    found = runs("kill", rank, "train", number)
    assert found["exits"][0][rank] == -signal.SIGKILL and found["exits"][0][1 - rank] not in (0, -signal.SIGKILL)
    assert found["seconds"] < STATED_SECONDS, found
    assert len(lines_with(f"rank {rank} is gone or stopped, last seen", found["said"])) == 1, found
    assert "Traceback" not in found["said"] and found["result"] is None


def check_stopped(runs: Runs, events: dict[str, int], seed: int) -> None:
    rank, number = drawn(seed, events["train"])
    found = runs("stop", rank, "train", number)
    assert 0 not in found["exits"][0] and found["seconds"] < TIMEOUT_SECONDS + STATED_SECONDS, found
    said = lines_with(f"rank {rank} is gone or stopped, last seen", found["said"])
    assert len(said) == 1 and re.search(r"step \d+, (in|after it began) \w+ over \w+", said[0]), found["said"]


def check_raised(runs: Runs, events: dict[str, int], seed: int) -> None:
    rank, number = drawn(seed, events["train"])
    found = runs("raise", rank, "train", number)
    assert found["exits"] == [[1, 1]] and found["seconds"] < STATED_SECONDS, found
    said = lines_with("planted", found["said"])
    assert len(said) == 1 and re.search(rf"rank {rank} failed in step \d+: ValueError: planted", said[0]), found["said"]
    assert "is gone" not in found["said"]


def check_asked_to_stop(runs: Runs, events: dict[str, int], seed: int) -> None:
    rank, number = drawn(seed, events["train"])
    found = runs("term", rank, "train", number)
    assert found["exits"] == [[0, 0]] and found["result"] == EXIT_STOPPED, found
    assert newest(found["stage"])["step"] == read_metrics(found["stage"])[-1]["step"] < 23
    assert len(lines_with("as asked, and saved: go on with --resume", found["said"])) == 1


def check_without_agent(runs: Runs, events: dict[str, int], seed: int) -> None:
    rank, number = drawn(seed, events["train"])
    found = runs("agent", rank, "train", number)
    assert found["exits"] == [] and found["seconds"] < STATED_SECONDS, found  # known when no process is left


def check_disk(runs: Runs, events: dict[str, int], seed: int) -> None:
    rank = seed % 2
    found = runs("disk", rank, "save", int(0.5 * events["save"]))
    assert found["exits"] == [[0, 0]] and found["result"] == EXIT_NOT_SAVED, found
    assert len(lines_with("cannot write the checkpoint of step", found["said"])) == 1, found["said"]
    assert newest(found["stage"])["step"] >= 5


CHECKS = [check_killed, check_stopped, check_raised, check_asked_to_stop, check_without_agent, check_disk]
Check = Callable[[Runs, dict[str, int], int], None]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_fault(check: Check, runs: Runs, events: dict[str, int], seed: int) -> None:
    check(runs, events, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_fault_many_times(check: Check, runs: Runs, events: dict[str, int]) -> None:
    for number in range(CAMPAIGN_TIMES):
        check(runs, events, 100 + number)


def test_not_finite_on_one_rank_is_skipped_by_all(runs: Runs) -> None:
    found = runs("nan", 1, "", 7)
    assert found["exits"] == [[0, 0]] and found["result"] == 0, found
    assert [event["step"] for event in read_events(found["stage"]) if event["kind"] == "skip"] == [7]
    assert [line for line in read_metrics(found["stage"]) if "loss" in line][-1]["skipped"] == 1


def test_a_slow_rank_is_named(runs: Runs) -> None:
    rank = 1
    found = runs("slow", rank, flags=["--train.steps", "23", "--train.save-every", "23"])
    slow = [event["reason"] for event in read_events(found["stage"]) if event["kind"] == "slow"]
    assert len(slow) == 1 and slow[0].startswith(f"rank {rank} is slow"), found["said"]
    assert slow[0] in found["said"]


def test_only_a_rank_that_stays_slow_is_named_and_once() -> None:
    pace = Pace(slow=1.5, window_steps=3)
    said = [pace.observe(seconds) for seconds in [(1, 2, 1)] + [(1, 1, 1)] * 2 + [(1, 3, 1)] * 6]
    assert [number for number, line in enumerate(said) if line] == [5]
    assert said[5] is not None and "rank 1" in said[5] and "3.0 times" in said[5]


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


def test_saved_in_the_background_is_saved_at_once(runs: Runs) -> None:
    """Byte for byte, but for what tells the recipes and the clocks apart, and for the order in a file's header, which
    safetensors shuffles."""
    stages = [runs(flags=[*SHORT, *more])["stage"] for more in ([], ["--train.save-in-background"])]
    files = [
        {str(f.relative_to(stage)): header_and_data(f) for f in stage.glob("checkpoints/*/*.safetensors")}
        for stage in stages
    ]
    assert len(files[0]) == 4 and files[0] == files[1]
    metas = [newest(stage)["meta"] for stage in stages]
    for meta in metas:
        meta["state"].pop("seconds")
        meta["recipe"]["train"].pop("save_in_background")
    assert metas[0] == metas[1]
    kinds = [[event["kind"] for event in read_events(stage)] for stage in stages]
    assert kinds[0].count("save") == kinds[1].count("save") == 5


def test_what_fails_in_the_background_ends_all_at_the_next_save(runs: Runs, events: dict[str, int]) -> None:
    found = runs("disk", 1, "train", int(0.5 * events["train"]), flags=[*SHORT, "--train.save-in-background"])
    assert found["exits"] == [[0, 0]] and found["result"] == EXIT_NOT_SAVED, found
    said = lines_with("cannot write the checkpoint of step", found["said"])
    step = 5 if "of step 10 " in said[0] else 10  # that of step 10 was perhaps still under way
    assert len(said) == 1 and newest(found["stage"])["step"] == step, found["said"]
