"""Sweeps of a fake trainer: results, pruning, errors, workers, kills at any moment, and the records."""

import json
import math
import os
import random
import re
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from quern.flags.recipe_file import read_recipe_file
from quern.flags.recipe_flags import Arguments, parse
from quern.lab import search
from quern.lab.options import SweepOptions
from quern.lab.search.results import importances, write_results
from quern.lab.search.space import apply, point, read_space
from quern.lab.search.sweep import Sweep, fill, run
from quern.lab.study import start_facts
from quern.lab.trainer import Point, Trial
from quern.lab.verdict import WORST
from quern.optim.groups import table
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import Recipe
from quern.recipes.gpt import RECIPE as BASELINE
from quern.records import read_lines
from quern.resolve import resolve
from tests.lab import sweep_worker
from tests.lab.sweep_worker import RECIPE, SPACE, FakeTrainer, score
from tests.support.command import Told
from tests.support.tiny_model import CPU

ROOT = Path(__file__).parents[2]
RATES = ("optim.matrix-lr=0.01..0.05:log",)
"""A space whose baseline is 0.02."""


def options(out: Path, **changed: Any) -> SweepOptions:
    return replace(SweepOptions(RECIPE, SPACE, out=out, study="s", sampler="random", trials=12, seeds=2), **changed)


def sweep(given: SweepOptions, trainer: Any = None) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Runs a sweep: its trials, its results, and what it logged."""
    lines: list[str] = []
    assert run(given, lines.append, trainer or FakeTrainer()) == 0
    trials = read_lines(given.folder / "sweep.jsonl")
    return trials, json.loads((given.folder / "results.json").read_text(encoding="utf-8")), lines


def expected(values: dict[str, Any], seeds: int = 2) -> float:
    """The value of a trial, from the fake trainer's formula."""
    recipe = apply(RECIPE, values)
    diverged = recipe.optim.matrix_lr > 0.08
    return statistics.fmean(WORST if diverged else score(recipe, seed) for seed in range(seeds))


@pytest.mark.parametrize(("sampler", "number"), [("random", 24), ("tpe", 24), ("gp", 12)])
def test_a_sweep_finds_the_best_of_its_trials(tmp_path: Path, sampler: Any, number: int) -> None:
    trials, results, lines = sweep(options(tmp_path, sampler=sampler, trials=number))
    assert len(trials) == number == results["trials"]
    for trial in trials:
        assert trial["bpb"] == pytest.approx(expected(trial["values"]))
        assert [body["seed"] for body in trial["runs"]] == [0, 1]
    assert results["best"] == min(trials, key=lambda trial: trial["bpb"])
    assert trials[0]["baseline"] and trials[0]["values"] == {"optim.matrix_lr": 0.02, "train.warmdown_share": 0.4}
    assert results["best"]["bpb"] - trials[0]["bpb"] == pytest.approx(results["against_baseline"]["bpb"])
    if number >= 20:
        assert results["importances"]["optim.matrix_lr"] > results["importances"]["train.warmdown_share"]
    assert (tmp_path / "lab/s/pairs.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert any(line.startswith("best: --optim.matrix-lr 0.0") for line in lines)


def test_the_best_at_the_edge_is_a_warning(tmp_path: Path) -> None:
    _, results, lines = sweep(options(tmp_path, space=("optim.matrix-lr=0.001,0.002,0.003",), sampler="grid"))
    edge = "the best optim.matrix-lr (0.003) is at the upper edge of 0.001,0.002,0.003: search higher values too"
    assert results["edges"] == [edge] and f"warning: {edge}" in lines
    _, results, _ = sweep(options(tmp_path, space=("optim.matrix-lr=0.003,0.03,0.07",), sampler="grid", study="t"))
    assert results["edges"] == []


def test_trials_without_a_score_are_kept_with_a_finite_value(tmp_path: Path) -> None:
    def fits(recipe: Recipe) -> None:
        if recipe.train.batch_tokens == 8192:
            raise MemoryError("8192 tokens do not fit")

    space = ("optim.matrix-lr=0.03,0.09", "train.batch-tokens=4096,4097,8192")
    trials, results, _ = sweep(options(tmp_path, space=space, sampler="grid"), FakeTrainer(before=fits))
    values = {(one["values"]["optim.matrix_lr"], one["values"]["train.batch_tokens"]): one for one in trials}
    outcomes = {4096: "diverged", 4097: "refused", 8192: "out of memory"}
    assert {size: values[0.09, size]["outcome"] for size in outcomes} == outcomes
    assert {values[0.09, size]["bpb"] for size in outcomes} == {WORST} and values[0.03, 4096]["outcome"] == "finished"
    assert [body["bpb"] for body in values[0.09, 4096]["runs"]] == [None, None]
    assert "train.batch-tokens must be a multiple of model.context" in values[0.03, 4097]["reason"]
    assert values[0.03, 8192]["reason"] == "8192 tokens do not fit"
    assert results["outcomes"] == {"diverged": 1, "finished": 1, "out of memory": 2, "refused": 2}
    stepped = options(tmp_path, study="stepped", space=("train.warmdown-share=0.2..0.6:0.2",), sampler="grid")
    trials, _, _ = sweep(stepped)  # 0.2 + 2 · 0.2 is above 0.6
    assert [one["values"]["train.warmdown_share"] for one in trials] == [0.2, 0.4, 0.6]
    space = ("model.key-offset=false,true", "train.clip-norm=none,1")
    _, _, lines = sweep(options(tmp_path, study="odd", space=space, sampler="grid"))
    assert "best: --model.no-key-offset (no --train.clip-norm)" in lines


def test_the_command_line_of_a_sweep_and_of_its_workers() -> None:
    flags = "--seed 1000 --train.steps 9 --workers 2 --space optim.matrix-lr=0.1..0.2 a.toml --pruner hyperband"
    given = parse(SweepOptions, BASELINE, Arguments([*flags.split(), "--workers", "1"]), verb="lab plan")
    assert given.space == ("optim.matrix-lr=0.1..0.2", "a.toml") and given.recipe.train.steps == 9
    assert given.recipe.seed == 1000
    assert given.workers == 1  # a worker gets the command of the sweep with --workers 1 at its end
    assert given.folder == Path("out/lab/a")


def test_wilcoxon_ends_worse_trials_after_some_seeds_and_never_the_best(tmp_path: Path) -> None:
    trials, results, _ = sweep(options(tmp_path, seeds=6, trials=16, pruner="wilcoxon"))
    assert results["outcomes"]["pruned"] >= 5
    assert expected(results["best"]["values"], 6) == min(expected(one["values"], 6) for one in trials)
    assert len(results["best"]["runs"]) == 6
    for one in trials:
        assert (len(one["runs"]) < 6) == (one["outcome"] == "pruned")
        if one["outcome"] == "pruned":  # the mean so far, on the same first seeds as the others
            assert one["bpb"] == pytest.approx(expected(one["values"], len(one["runs"])))
            assert one["bpb"] > results["best"]["bpb"]
            assert len(one["runs"]) >= 4


def test_hyperband_ends_worse_trials_in_their_first_run(tmp_path: Path) -> None:
    trials, results, _ = sweep(options(tmp_path, trials=24, pruner="hyperband"))
    assert len(trials) == 24
    ended = [one for one in trials if one["outcome"] == "pruned"]
    assert len(ended) >= 6
    assert all(one["runs"] == [] and 1 <= len(one["reported"]) <= 8 for one in ended)
    assert min(len(one["reported"]) for one in ended) < 8
    assert results["best"]["outcome"] == "finished"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampler": "grid"}, "a grid needs the values of optim.matrix-lr"),
        ({"pruner": "wilcoxon"}, "--pruner wilcoxon needs --seeds 5 or more"),
        ({"pruner": "hyperband", "evaluations": 2}, "needs --evaluations 4 or more"),
        ({"space": ()}, "the space is empty"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(options(tmp_path, **changed))


@pytest.mark.parametrize("command", ["sweep --space optim.matrix-lr=0.1..0.2 --sampler grid", "scaling --check none"])
def test_wrong_flags_are_refused_before_the_machine_is_tried_out(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: Told
) -> None:
    monkeypatch.setattr("quern.flags.check_flags.DeviceOptions.detect", lambda self: pytest.fail("tried out"))
    said = told("lab", *command.split(), "--model.context", "64", "--out", tmp_path, code=1)
    assert re.search("needs the values of optim.matrix-lr|no fitted study in .*none", said)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "quern.lab.search.sweep")
    monkeypatch.delattr(search, "sweep", raising=False)
    said = told("lab", "sweep", "--space", *SPACE, "--train.steps", "9", code=1)
    assert "sweeps need extra packages" in said and "pip install -e '.[lab]'" in said


FACTS: dict[str, Any] = start_facts(CPU, "quern lab sweep")


def test_a_study_keeps_its_plan_and_the_facts_of_its_first_start_and_may_grow(tmp_path: Path) -> None:
    def start(trials: int, source: str = "RECIPE = …", **changed: Any) -> list[str]:
        lines: list[str] = []
        facts = FACTS | {"commit": f"at {trials}", "registered": str(trials)}
        run(options(tmp_path, trials=trials, **changed), lines.append, FakeTrainer(), facts=facts, source=source)
        return [line for line in lines if line.startswith("warning: the study")]

    assert start(5) == []
    before = read_lines(tmp_path / "lab/s/sweep.jsonl")
    with pytest.raises(ValueError, match="study s was registered with another pruner, seeds"):
        start(5, seeds=6, pruner="wilcoxon")
    with pytest.raises(ValueError, match=r"another space\.train\.final_lr"):
        start(5, space=(*SPACE, "train.final-lr=0..0.1"))
    with pytest.raises(ValueError, match="registered with another source"):
        start(5, source="RECIPE = … # edited")
    told = "warning: the study 's' was started by other software: commit at 5 then, at 8 now"
    assert start(8, sampler="tpe") == [told]
    after = read_lines(tmp_path / "lab/s/sweep.jsonl")
    assert after[:5] == before and len(after) == 8
    assert len({json.dumps(one["values"]) for one in after}) == 8  # a later start draws other values
    results = json.loads((tmp_path / "lab/s/results.json").read_text(encoding="utf-8"))
    assert results["facts"]["registered"] == "5" and results["trials"] == 8


def test_an_error_of_the_disk_ends_the_worker_and_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    """It is no property of the trial, whose number of errors would be limited."""

    ran, began = tmp_path / "ran.txt", list[Recipe]()

    def fills(recipe: Recipe) -> None:
        began.append(recipe)
        if len(began) >= 4:
            raise OSError("the disk is full")

    trainer = FakeTrainer(ran, fills)
    for _ in range(3):
        with pytest.raises(OSError, match="disk is full"):
            sweep(options(tmp_path, trials=5), trainer)
    trials, _, _ = sweep(options(tmp_path, trials=5), FakeTrainer(ran))
    assert len(trials) == 5
    assert all(trial["bpb"] == pytest.approx(expected(trial["values"])) for trial in trials)
    lines = ran.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == 10


def test_a_trial_that_fails_again_is_finished_and_blocks_no_other(tmp_path: Path) -> None:
    def divides(recipe: Recipe) -> None:
        if recipe.optim.matrix_lr == 0.02:
            raise ZeroDivisionError("the rule divides by the rate - 0.02")

    # As the first trial it is also the best at first, with which Wilcoxon's test compares the next one.
    given = options(tmp_path, trials=4, space=RATES, seeds=5, pruner="wilcoxon")
    with pytest.raises(ZeroDivisionError):
        sweep(given, FakeTrainer(before=divides))
    trials, results, lines = sweep(given, FakeTrainer(before=divides))
    assert len(trials) == 4 and set(results["outcomes"]) <= {"failed", "finished", "pruned"}
    failed = next(one for one in trials if one["outcome"] == "failed")
    assert (failed["bpb"], failed["values"]["optim.matrix_lr"], failed["runs"]) == (WORST, 0.02, [])
    assert failed["reason"].endswith(": ZeroDivisionError: the rule divides by the rate - 0.02")
    assert failed["baseline"]  # also as the second try
    assert results["against_baseline"] is None and results["best"]["outcome"] == "finished"
    assert any("8.0000 bits per byte, failed (" in line and "ZeroDivisionError: the" in line for line in lines)


def test_a_sweep_that_is_killed_and_ends_with_two_workers_loses_and_repeats_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    numbers = random.Random(7)
    for kill_at in [numbers.randrange(500, 3000) for _ in range(4)]:
        child = os.fork()
        if child == 0:
            sweep_worker.sweep(tmp_path, 24, kill_at=kill_at)
            os._exit(1)  # not killed
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert sweep_worker.sweep(tmp_path, 24, workers=2) == 0
    assert (tmp_path / "lab/sweep/worker-1.log").read_text(encoding="utf-8") == ""
    lines = read_lines(tmp_path / "lab/sweep/sweep.jsonl")
    assert sorted(line["trial"] for line in lines) == list(range(24)), "every trial has finished once"
    assert all(line["bpb"] == pytest.approx(expected(line["values"])) for line in lines)
    assert {line["outcome"] for line in lines} <= {"finished", "diverged"}
    assert len({json.dumps(line["values"]) for line in lines}) == 24
    runs = Counter((tmp_path / "ran.txt").read_text(encoding="utf-8").splitlines())
    assert len(runs) == 48 and sum(runs.values()) <= 48 + 4  # a kill may come between the end of a run and its record


# Results ----------------------------------------------------------------------------------------------------


def lines_with(pruned: float) -> list[dict[str, Any]]:
    """40 trials, the last ten of them ended by Wilcoxon's test with a partial mean of `pruned`."""
    lines = list[dict[str, Any]]()
    for number in range(40):
        rate, share, bpb = 0.001 + number / 1000, 0.3 + 0.01 * (7 * number % 50), 1.5 + number / 100
        values = {"optim.matrix_lr": rate, "train.warmdown_share": share}
        line = {"trial": number, "outcome": "finished", "bpb": bpb, "values": values, "runs": [{"bpb": bpb}] * 2}
        ended = {"outcome": "pruned", "bpb": pruned, "runs": [{"bpb": bpb}]} if number >= 30 else {}
        lines.append(line | {"baseline": False, "reported": {}} | ended)
    return lines


def test_the_mean_of_some_seeds_is_never_the_best(tmp_path: Path) -> None:
    """Optuna compares a trial that it prunes with the best of the study, which need not be one that counts."""
    space, lines = read_space(SPACE, resolve(RECIPE)), lines_with(pruned=1.4)
    study, other = (fill(optuna.create_study(), one, space) for one in (lines, lines_with(pruned=3.0)))
    plan = {"recipe": RECIPE.to_json(), "space": dict.fromkeys(space, ""), "seeds": [[0, 0], [1, 1]], "facts": None}
    kept = Sweep.register(tmp_path / "s", plan)
    told = write_results(kept, lines, study, space)
    results = json.loads((tmp_path / "s/results.json").read_text(encoding="utf-8"))
    assert (results["best"]["trial"], results["best"]["bpb"]) == (0, 1.5)
    assert results["outcomes"] == {"finished": 30, "pruned": 10}
    head = next(at for at, line in enumerate(told) if line.split()[0:1] == ["trial"])
    ranked = [int(line.split()[0]) for line in told[head + 1 : head + 11]]
    assert ranked == [*range(10)], "those that were pruned have 30 and above"
    assert importances(study) == importances(other) != {}


def test_a_run_that_diverged_is_null_in_the_records_and_counts_in_the_difference_from_the_best(tmp_path: Path) -> None:
    class Unlucky(FakeTrainer):
        def train(self, recipe: Recipe, **how: Any) -> Trial:
            done = super().train(recipe, **how)
            lost = replace(done, bpb=math.nan, curve=(Point(1, 0, 0.0, 0.0, math.nan),))
            return lost if done.seed == 1 and recipe.optim.matrix_lr == 0.02 else done

    trials, results, _ = sweep(options(tmp_path, space=RATES, trials=6, seeds=3), Unlucky())
    own, best = trials[0], results["best"]
    assert own["baseline"] and own["outcome"] == "diverged" and best["outcome"] == "finished"
    assert own["runs"][1]["bpb"] is own["runs"][1]["curve"][0]["bpb"] is None and own["runs"][0]["bpb"]
    pairs = zip(best["runs"], own["runs"], strict=True)
    difference = statistics.fmean(ours["bpb"] - (theirs["bpb"] or WORST) for ours, theirs in pairs)
    assert results["against_baseline"]["bpb"] == pytest.approx(difference) == pytest.approx(best["bpb"] - own["bpb"])
    for name in ("sweep.jsonl", "results.json"):
        assert "NaN" not in (tmp_path / "lab/s" / name).read_text(encoding="utf-8")


# The study of all rates -------------------------------------------------------------------------------------


def test_the_recipe_of_all_rates_is_the_baseline_until_a_field_changes() -> None:
    recipe, _ = read_recipe_file(ROOT / "experiments/studies/rates.py")
    space = read_space([str(ROOT / "experiments/studies/rates.toml")], recipe)
    assert len(space) == 34
    ours = resolve(replace(recipe, train=replace(recipe.train, steps=100)))
    base = resolve(replace(BASELINE, train=replace(BASELINE.train, steps=100)))
    assert ours.make_rules(ours) == table(base)
    told, baseline = ours.make_schedule(ours.train), warmup_stable_decay(base.train)
    assert [told(step) for step in range(100)] == [baseline(step) for step in range(100)]
    assert point(space, ours) is not None
    changed = apply(ours, {"optim.x0_scales_beta1": 0.9, "train.momentum_final": 0.85, "optim.matrix_lr": 0.03})
    rules: Callable[[Recipe], Any] = changed.make_rules
    assert rules(changed)["x0_scales"].rule.betas[0] == 0.9
    assert rules(changed)["matrices"].lr == pytest.approx(1.5 * table(base)["matrices"].lr)
    momentum = [changed.make_schedule(changed.train)(step).momentum for step in (0, 60, 80, 100)]
    assert momentum == pytest.approx([0.95, 0.95, 0.90, 0.85])
