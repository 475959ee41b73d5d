"""The driver of a comparison, with arms whose scores are a function of the seeds: its trials and its conclusions."""

import ast
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.lab import compare as comparing
from quern.lab.arms import Order
from quern.lab.compare import Workers, compare
from quern.lab.idea import read_idea, with_verdict
from quern.lab.log.comparison import read
from quern.lab.log.publish import LogOptions, pages, run
from quern.lab.names import locked, start_facts
from quern.lab.results import all_results, steps_of
from quern.lab.study import TRIALS, Registration, Study, register
from quern.lab.trainer import Point, Trial
from tests.support.toy_training import CPU

PRIVATE = "/somewhere/private/text"
COST = {"base": 1.0, "dear": 1.25, "same": 1.0, "broken": 1.0, "twin": 1.0}
SLOW = {"base": 1.0, "dear": 1.0, "same": 1.0, "broken": 1.0, "twin": 1.2}
GAIN = {"base": 0.0, "dear": 0.03, "same": 0.0, "broken": 0.0, "twin": 0.0}
IDEA = '''"""{}: an idea.

Hypothesis: it helps.
Source: a log.
Expected effect: better.
Verdict: not yet measured.
"""
'''


def trial(order: Order) -> Trial:
    """Bits per byte fall with the logarithm of the steps; the seed moves both arms, and a little noise each of them."""
    if order.arm == "lost":
        raise RuntimeError("the arm lost process failed: out of memory")
    name = "base" if order.arm == "twin" else order.arm
    noise = math.sin(12.9898 * order.seed + 78.233 * sum(map(ord, name))) * 43758.5453
    noise = 0.004 * (noise - math.floor(noise) - 0.5)
    bpb = 2 - 0.1 * math.log(order.steps) - GAIN[order.arm] + 0.05 * math.sin(order.seed) + noise
    seconds = order.steps * COST[order.arm] * SLOW[order.arm]
    points = tuple(Point(s, 10 * s, 10.0 * s, float(s), bpb + 1 / s) for s in (order.steps // 2, order.steps))
    return Trial(
        recipe=order.arm,
        steps=order.steps,
        seed=order.seed,
        data_seed=order.data_seed,
        tokens=10 * order.steps,
        flops=10 * order.steps * COST[order.arm],
        seconds=seconds,
        bpb=None if order.arm == "broken" else bpb,
        tokens_per_second=10 / COST[order.arm] / SLOW[order.arm],
        peak_bytes=1000,
        parameters={"total": 7},
        curve=points,
    )


class Killed(Exception):
    """Stands for the end of the process."""


def fake_arms(trained: list[tuple[list[str], int, int]], most: float = math.inf) -> Callable[..., Any]:
    """Arms without processes. trained: receives (names, pair, steps); most: trials until `Killed`."""

    done = iter(range(10**6))

    class Fake:
        def __init__(self, *arguments: Any, **more: Any) -> None: ...
        def __enter__(self) -> "Fake":
            return self

        def __exit__(self, *error: object) -> None: ...
        def end(self) -> None: ...
        def train(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Trial]]:
            trained.append(([order.arm for order in orders], orders[0].pair, orders[0].steps))
            for order in orders:
                if next(done) >= most:
                    raise Killed
                yield order, trial(order)

    return Fake


def registration(*ideas: str, **changes: Any) -> Registration:
    body: dict[str, Any] = {
        "base": "base",
        "ideas": ideas,
        "recipes": {"base": {"depth": 1, "data": PRIVATE, "val": None, "train": {"batch_tokens": 10}}},
        "sources": {idea: IDEA.format(idea) for idea in ideas},
        "steps": 100,
        "axes": ("steps", "flops", "seconds"),
        "horizons": (0.5, 2.0),
        "horizon_pairs": 3,
        "evaluations": 2,
        "delta": 0.005,
        "alpha": 0.05,
        "tau2": 1.0,
        "most_pairs": 12,
        "vary": "both",
        "seed": 5,
        "text": "c0ffee",
        "same_time": 0.02,
        "detectable_sd": 1.5,
    }
    return Registration(**body | changes)


def opened(folder: Path, *ideas: str, **changes: Any) -> Study:
    return register(
        folder / "lab" / "toy", registration(*ideas, **changes), start_facts(CPU, f"quern lab compare --data {PRIVATE}")
    )


def go(
    study: Study, monkeypatch: pytest.MonkeyPatch, **fake: Any
) -> tuple[list[Any], list[tuple[list[str], int, int]]]:
    trained: list[tuple[list[str], int, int]] = []
    monkeypatch.setattr(comparing, "Arms", fake_arms(trained, **fake))
    results, failed = compare(study, [], Workers(1, study.folder, {}), lambda line: None)
    assert failed == []
    return results, trained


def test_verdicts_axes_and_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened(tmp_path, "dear", "same")
    results, trained = go(study, monkeypatch)
    found = {(one.idea, one.axis): one for one in results}
    assert found["dear", "steps"].verdict == "better" and found["dear", "steps"].steps == 100
    assert found["dear", "flops"].steps == found["dear", "seconds"].steps == 80, "a quarter dearer: 100 / 1.25 steps"
    assert found["dear", "flops"].paired.mean == pytest.approx(-0.03 + 0.1 * math.log(1.25), abs=0.003)
    assert found["same", "steps"].verdict == "no difference" == found["same", "seconds"].verdict
    saved = found["dear", "steps"].saved
    assert saved is not None and saved.share == pytest.approx(1 - math.exp(-0.3), abs=0.03)
    assert saved.interval[0] < saved.share < saved.interval[1]
    assert found["dear", "steps"].speed == pytest.approx(0.8) and found["dear", "steps"].paired.correlation > 0.9
    assert trained[0] == (["base", "dear"], 0, 100), "the first pair alternates"
    assert (["base", "same"], 0, 100) in trained, "also with a baseline that is trained already"
    later = [names for names, pair, steps in trained if pair and steps == 100 and "same" in names]
    assert later and all(names == ["same"] for names in later if len(names) == 1)
    assert len({(tuple(n), p, s) for n, p, s in trained}) == len(trained), "nothing is trained twice"


@pytest.mark.parametrize("killed_at", [1, 2, 3, 5, 8, 13])
def test_killed_and_started_again_nothing_is_lost_or_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    whole = opened(tmp_path / "whole", "dear", "same")
    go(whole, monkeypatch)
    study = opened(tmp_path, "dear", "same")
    with pytest.raises(Killed):
        go(study, monkeypatch, most=killed_at)
    assert len(study.entries) == killed_at
    with (study.folder / TRIALS).open("a") as stream:
        stream.write('{"pair": 3, "torn')  # a line that a crash has cut
    again = opened(tmp_path, "dear", "same")
    assert len(again.entries) == killed_at
    results, trained = go(again, monkeypatch)
    assert [one.to_json() for one in results] == [one.to_json() for one in all_results(whole)]
    alone = [(names[0], pair, steps) for names, pair, steps in trained if len(names) == 1]
    kept = {(entry.trial.recipe, entry.pair, entry.trial.steps) for entry in study.entries}
    assert kept.isdisjoint(alone)


def test_times_of_two_sessions_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened(tmp_path, "dear")
    with pytest.raises(Killed):
        go(study, monkeypatch, most=1)  # the baseline's trial is kept, the idea's is lost
    for arm in ("base", "dear"):
        monkeypatch.setitem(SLOW, arm, 2.0)
    again = opened(tmp_path, "dear")
    go(again, monkeypatch)
    assert [steps_of(again, "dear", axis) for axis in ("steps", "flops", "seconds")] == [100, 80, 80]
    assert {one.speed for one in all_results(again)} == {0.8}


def test_an_axis_keeps_its_first_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one axis the idea is decided early; on another it takes all pairs."""
    monkeypatch.setitem(COST, "same", 1.25)
    monkeypatch.setitem(GAIN, "same", 0.0223)  # what a fifth of the steps is worth
    study = opened(tmp_path, "same", delta=0.0001)
    results, trained = go(study, monkeypatch)
    found = {one.axis: one for one in results}
    assert found["steps"].verdict == "better" and found["flops"].verdict == "undecided"
    last = found["steps"].pairs[-1]
    assert last < 11 and not [1 for names, pair, steps in trained if pair > last and steps == 100 and "same" in names]
    assert found["flops"].pairs == tuple(range(12))


def test_an_idea_whose_process_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened(tmp_path, "lost", "dear", axes=("steps",))
    trained: list[tuple[list[str], int, int]] = []
    monkeypatch.setattr(comparing, "Arms", fake_arms(trained))
    said: list[str] = []
    results, failed = compare(study, [], Workers(1, study.folder, {}), said.append)
    assert failed == ["lost"] and [(one.idea, one.verdict) for one in results] == [("dear", "better")]
    assert "lost cannot be compared: the arm lost process failed: out of memory" in said


def test_an_idea_that_changes_nothing_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed differs by more than `same_time`, as on a busy machine. Of the other idea all pairs are trained."""
    study = opened(tmp_path, "twin", "dear")
    trained: list[tuple[list[str], int, int]] = []
    monkeypatch.setattr(comparing, "Arms", fake_arms(trained))
    said: list[str] = []
    results, _ = compare(study, [], Workers(1, study.folder, {}), said.append)
    assert [each for each in trained if "twin" in each[0]] == [(["base", "twin"], 0, 100)] == trained[:1]
    assert trained[1] == (["base", "dear"], 0, 100), "for the twin alone, no other horizon is trained"
    told = [line for line in said if line.startswith("  twin")]
    assert told == ["  twin: the idea changes nothing here: both runs of its first pair are equal, bit for bit"]
    found = {(one.idea, one.axis): one for one in results}
    for axis in ("steps", "flops", "seconds"):
        assert found["twin", axis].verdict == "changes nothing" and found["twin", axis].cells()[-2:] == ["", ""]
    assert found["dear", "steps"].verdict == "better"
    row = next(line for line in read(study.folder).section if line.startswith("| twin"))
    assert row.count("changes nothing") == 3 and row.endswith("| better | open |")


def test_a_run_that_diverges_counts_as_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = go(opened(tmp_path, "broken", axes=("steps",)), monkeypatch)
    assert results[0].verdict == "worse" and results[0].paired.diverged == (0, results[0].paired.n)


def test_another_registration_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, "dear")
    with pytest.raises(ValueError, match="registered with another delta, alpha, which must not change after the first"):
        opened(tmp_path, "dear", delta=0.1, alpha=0.2)
    assert opened(tmp_path, "dear").registration == registration("dear")


@pytest.mark.parametrize(("vary", "expected"), [("both", (8, 8)), ("init", (8, 5)), ("data", (5, 8))])
def test_what_differs_between_pairs(vary: str, expected: tuple[int, int]) -> None:
    assert registration("dear", vary=vary).seeds(3) == expected and registration("dear").seeds(0) == (5, 5)


def test_equal_time_within_the_clocks_resolution_shares_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SLOW, "same", 1.009)
    study = opened(tmp_path, "same")
    go(study, monkeypatch)
    assert [steps_of(study, "same", axis) for axis in ("steps", "flops", "seconds")] == [100, 100, 100]


def test_a_published_study_can_continue(tmp_path: Path) -> None:
    """`quern lab log` writes the verdict into the idea's file, whose text is registered."""
    study = opened(tmp_path, "dear")
    verdict = with_verdict(study.registration.sources["dear"], "better. " * 30)
    assert verdict != study.registration.sources["dear"]
    assert opened(tmp_path, "dear", sources={"dear": verdict}).registration == study.registration
    with pytest.raises(ValueError, match="registered with another sources"):
        opened(tmp_path, "dear", sources={"dear": verdict + "X = 1\n"})


@pytest.mark.parametrize(
    ("expected", "direction"),
    [("better at equal steps.", "better"), ("slightly worse.", "worse"), ("no difference, slower.", "no difference")]
    + [("betterment", None), ("no better than bigram.py.", None), ("", None)],
)
def test_what_a_source_predicts(expected: str, direction: str | None) -> None:
    assert read_idea(f'"""T.\n\nExpected effect: {expected}\n"""').direction == direction


@pytest.mark.parametrize(
    "source",
    ['"""T.\n\nVerdict: old."""\nX = 1\n', '"""T.\n\nVerdict: old\nand more.\nSource: s.\n"""\nX = 1\n', "X = 1\n"],
)
def test_a_verdict_changes_nothing_but_the_docstring(source: str) -> None:
    new = with_verdict(source, "better at equal steps. " * 9)
    assert new.endswith("X = 1\n") and ast.unparse(ast.parse(new).body[-1]) == "X = 1"
    if "Verdict" in source:
        assert read_idea(new).verdict == ("better at equal steps. " * 9).strip() and "old" not in new
        assert read_idea(new).source == read_idea(source).source and with_verdict(new, "old.") != source * 2
        assert max(map(len, new.splitlines())) <= 120
    else:
        assert new == source


def test_a_study_is_open_once_and_on_one_kind_of_machine(tmp_path: Path) -> None:
    opened(tmp_path, "dear")
    folder = tmp_path / "lab" / "toy"
    with locked(folder), pytest.raises(ValueError, match="process .* works on the study toy: wait"), locked(folder):
        raise AssertionError
    other = start_facts(replace(CPU, dtype=torch.bfloat16), "quern lab compare")
    with pytest.raises(ValueError, match=r"started with another --dtype \(float32 then, bfloat16 now\)"):
        register(folder, registration("dear"), other)
    said: list[str] = []
    register(folder, registration("dear"), start_facts(CPU, "") | {"commit": "other"}, said.append)
    assert len(said) == 1 and "was started by other software: commit" in said[0]


def test_the_log_is_made_from_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened(tmp_path / "out", "dear", "same")
    go(study, monkeypatch)
    rows = json.loads((study.folder / "verdicts.json").read_text(encoding="utf-8"))
    assert {"idea", "axis", "verdict", "pairs"} <= set(rows[0])
    project = tmp_path / "project"
    project.mkdir()
    with pytest.raises(FileNotFoundError, match="experiments is no folder: name the folder of a project with --folder"):
        run(LogOptions(study=("toy",), out=tmp_path / "out", folder=project), [].append)
    (project / "experiments").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no published study: name one of .*/out/lab with --study"):
        run(LogOptions(out=tmp_path / "out", folder=project), [].append)
    assert list(project.rglob("*")) == [project / "experiments"]
    (project / "experiments" / "dear.py").write_text(IDEA.format("dear") + "X = 1\n", encoding="utf-8")
    index = "| file | verdict |\n| [dear.py](dear.py) | not yet measured |\n| [x.py](x.py) | not yet measured |\n"
    (project / "experiments" / "README.md").write_text(index, encoding="utf-8")
    said: list[str] = []
    run(LogOptions(study=("toy",), out=tmp_path / "out", folder=project), said.append)
    log = (project / "experiments" / "LOG.md").read_text(encoding="utf-8")
    assert "| dear | better, -0.03" in log and "| better | yes |" in log and "| better | no |" in log
    text = (project / "experiments" / "dear.py").read_text(encoding="utf-8")
    assert "\nVerdict: better at equal steps (-0.0" in text and text.endswith('Study toy.\n"""\nX = 1\n')
    index = (project / "experiments" / "README.md").read_text(encoding="utf-8")
    assert "| [dear.py](dear.py) | steps: better, " in index and "| [x.py](x.py) | not yet measured |" in index
    page = (project / "docs" / "experiments" / "toy.md").read_text(encoding="utf-8")
    records = (project / "experiments" / "records" / "toy" / "study.json").read_text(encoding="utf-8")
    assert "private" not in records + page + log and '"data": "text"' in records
    assert "quern lab compare" in page and "](toy-dear.svg)" in page and "](toy-seconds.svg)" in page
    for path, expected in pages([read(project / "experiments" / "records" / "toy")]).items():
        assert (project / path).read_text(encoding="utf-8") == expected, "made again, it is the same"
    run(LogOptions(folder=project), said.append)
    assert (project / "experiments" / "dear.py").read_text(encoding="utf-8") == text
