"""The records of a sweep: which trials are ranked, what is written, and what errors of trials become."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from quern import machine as machines
from quern.lab.search.results import importances, write_results
from quern.lab.search.space import read_space
from quern.lab.search.sweep import run
from quern.lab.search.trials import Sweep, fill
from quern.lab.study import start_facts
from quern.lab.verdict import WORST
from quern.recipe import Recipe
from quern.resolve import resolve
from tests.lab.sweep_worker import RECIPE, SPACE, FakeRun, FakeTrainer
from tests.lab.test_sweep import options, sweep

FACTS: dict[str, Any] = {
    "command": "quern lab sweep",
    "registered": "2026-01-01T00:00:00+00:00",
    "quern": "1",
    "commit": "abc",
    "machine": {"device": "cpu", "dtype": "float32", "compiled": True, "torch": "2.9"},
}


def lines_with(pruned: float) -> list[dict[str, Any]]:
    """40 trials, the last ten of them ended by Wilcoxon's test with a partial mean of `pruned`."""
    return [
        {
            "trial": number,
            "outcome": "pruned" if number >= 30 else "finished",
            "bpb": pruned if number >= 30 else 1.5 + number / 100,
            "values": {
                "optim.matrix_lr": 0.001 + number / 1000,
                "train.warmdown_share": 0.3 + 0.01 * (7 * number % 50),
            },
            "baseline": False,
            "reported": {},
            "runs": [{"bpb": 1.5 + number / 100}] * (1 if number >= 30 else 2),
        }
        for number in range(40)
    ]


def test_the_mean_of_some_seeds_is_never_the_best(tmp_path: Path) -> None:
    """Optuna compares a trial that it prunes with the best of the study, which need not be one that counts."""
    space, lines = read_space(SPACE, resolve(RECIPE)), lines_with(pruned=1.4)
    study, other = (fill(optuna.create_study(), one, space) for one in (lines, lines_with(pruned=3.0)))
    kept = Sweep.register(tmp_path / "s", {"seeds": [[0, 0], [1, 1]], "facts": None})
    for line in lines:
        kept.add("sweep.jsonl", line)
    told = write_results(kept, study, space)
    results = json.loads((tmp_path / "s/results.json").read_text(encoding="utf-8"))
    assert (results["best"]["trial"], results["best"]["bpb"]) == (0, 1.5)
    assert results["outcomes"] == {"finished": 30, "pruned": 10}
    assert not [line for line in told if " pruned " in line]
    assert importances(study) == importances(other) != {}


def test_a_run_of_the_baseline_that_diverged_counts_in_its_difference_from_the_best(tmp_path: Path) -> None:
    class Unlucky(FakeTrainer):
        def train(self, recipe: Recipe, **how: Any) -> FakeRun:
            done = super().train(recipe, **how)
            return replace(done, bpb=None) if done.seed == 1 and recipe.optim.matrix_lr == 0.02 else done

    space = ("optim.matrix-lr=0.01..0.05:log",)
    trials, results, _ = sweep(options(tmp_path, space=space, trials=6, seeds=3), Unlucky())
    own, best = trials[0], results["best"]
    assert own["baseline"] and own["outcome"] == "diverged" and best["outcome"] == "finished"
    differences = [
        ours["bpb"] - (theirs["bpb"] or WORST) for ours, theirs in zip(best["runs"], own["runs"], strict=True)
    ]
    assert results["against_baseline"]["bpb"] == pytest.approx(statistics.fmean(differences))
    assert results["against_baseline"]["bpb"] == pytest.approx(best["bpb"] - own["bpb"])


def test_a_validation_that_is_not_a_number_is_null_in_the_records(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Curved(FakeRun):
        curve: tuple[float, ...] = (1.5, math.nan)

    class Diverging(FakeTrainer):
        def train(self, recipe: Recipe, **how: Any) -> FakeRun:
            return Curved(how["seed"], math.nan)

    trials, results, lines = sweep(options(tmp_path, trials=2), Diverging())
    assert [one["outcome"] for one in trials] == ["diverged", "diverged"]
    assert trials[0]["runs"] == [{"seed": seed, "bpb": None, "curve": [1.5, None]} for seed in (0, 1)]
    for name in ("sweep.jsonl", "results.json"):
        assert "NaN" not in (tmp_path / "lab/s" / name).read_text(encoding="utf-8")


def test_another_source_of_the_recipe_is_another_plan(tmp_path: Path) -> None:
    given = options(tmp_path, trials=2)
    run(given, print, FakeTrainer(), source="RECIPE = …")
    with pytest.raises(ValueError, match="registered with another source"):
        run(given, print, FakeTrainer(), source="RECIPE = … # edited")


def test_the_facts_of_the_first_start_are_kept_and_another_device_is_refused(tmp_path: Path) -> None:
    lines: list[str] = []

    def start(facts: dict[str, Any], trials: int) -> None:
        run(options(tmp_path, trials=trials), lines.append, FakeTrainer(), facts=facts)

    start(FACTS, 2)
    start(FACTS | {"registered": "later"}, 3)
    assert not [line for line in lines if line.startswith("warning")]
    start(FACTS | {"commit": "def"}, 4)
    assert [line for line in lines if line.startswith("warning: the study")] == [
        "warning: the study 's' was started by other software: commit abc then, def now"
    ]
    for name, flag in (("device", "--device"), ("dtype", "--dtype"), ("compiled", "--compile")):
        with pytest.raises(ValueError, match=rf"the study 's' was started with another {flag} \(.* then, other now\)"):
            start(FACTS | {"machine": FACTS["machine"] | {name: "other"}}, 5)
    results = json.loads((tmp_path / "lab/s/results.json").read_text(encoding="utf-8"))
    assert results["facts"] == FACTS and results["trials"] == 4


def test_facts_of_this_machine_have_what_is_compared(tmp_path: Path) -> None:
    eager, again = (start_facts(machines.detect("cpu", "fp32", compile=False), "quern lab sweep") for _ in range(2))
    assert json.loads(json.dumps(eager)) == eager
    study = Sweep.register(tmp_path / "s", {"facts": eager})
    assert study.compare_facts(again) is None
    with pytest.raises(ValueError, match=r"another --compile \(False then, True now\)"):
        study.compare_facts(eager | {"machine": eager["machine"] | {"compiled": True}})


def test_a_trial_that_fails_again_is_finished_and_blocks_no_other(tmp_path: Path) -> None:
    class Faulty(FakeTrainer):
        def train(self, recipe: Recipe, **how: Any) -> FakeRun:
            if recipe.optim.matrix_lr == 0.02:
                raise ZeroDivisionError("the rule divides by the rate - 0.02")
            return super().train(recipe, **how)

    # As the first trial it is also the best at first, with which Wilcoxon's test compares the next one.
    space = ("optim.matrix-lr=0.01..0.05:log",)
    given = options(tmp_path, trials=4, space=space, seeds=5, pruner="wilcoxon")
    with pytest.raises(ZeroDivisionError):
        sweep(given, Faulty())
    trials, results, lines = sweep(given, Faulty())
    assert len(trials) == 4 and set(results["outcomes"]) <= {"failed", "finished", "pruned"}
    assert results["outcomes"]["failed"] == 1
    failed = next(one for one in trials if one["outcome"] == "failed")
    assert (failed["bpb"], failed["values"]["optim.matrix_lr"], failed["runs"]) == (WORST, 0.02, [])
    assert failed["reason"] == "ZeroDivisionError: the rule divides by the rate - 0.02"
    assert failed["baseline"]  # also as the second try
    assert results["against_baseline"] is None and results["best"]["outcome"] == "finished"
    assert any("8.0000 bits per byte, failed (ZeroDivisionError: the rule" in line for line in lines)


def test_an_error_of_the_disk_is_no_property_of_a_trial(tmp_path: Path) -> None:
    class Full(FakeTrainer):
        def train(self, recipe: Recipe, **how: Any) -> FakeRun:
            raise OSError("the disk is full")

    for _ in range(3):
        with pytest.raises(OSError, match="disk is full"):
            sweep(options(tmp_path, trials=2), Full())
    trials, _, _ = sweep(options(tmp_path, trials=2))
    assert len(trials) == 2 and {one["outcome"] for one in trials} <= {"finished", "diverged"}
