"""Two runs compared item by item: the statistics against known values, the pairing of items, and the command."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from quern.cli import main
from quern.eval.answers import compare, mcnemar, paired_bootstrap, read_answers
from tests.support.llama_run import llama_recipe, write_run

PLAIN = "--no-compile --dtype fp32 --threads 1 --device cpu".split()
NAMES = ("a/sft", "b/sft")


def write(folder: Path, scores: dict[str, float], task: str = "t/k") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"task": task}]
    lines += [{"item": n, "prompt": name.strip("'"), "score": score} for n, (name, score) in enumerate(scores.items())]
    (folder / "k.answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (121, 59, 2 * sum(math.comb(180, right) for right in range(60)) / 2**180),
        (10, 2, 2 * (1 + 12 + 66) / 2**12),
        (2, 10, 2 * (1 + 12 + 66) / 2**12),
        (5, 0, 2 / 2**5),
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_is_exact(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p, rel=1e-9)


def test_the_bootstrap_agrees_with_scipy_and_with_theory() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, 400)
    low, high = paired_bootstrap(values)
    other = stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=2).confidence_interval
    error = values.std() / math.sqrt(400)
    assert (low, high) == pytest.approx((other.low, other.high), abs=0.15 * error)
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)
    assert paired_bootstrap(values) == (low, high) and paired_bootstrap([0.5] * 9) == (0.5, 0.5)
    assert paired_bootstrap([0.5]) == (0.5, 0.5)


def test_items_are_paired_by_their_prompt(tmp_path: Path) -> None:
    first = read_answers(write(tmp_path / "a", {"x": 1, "y": 1, "z": 0, "w": 1}))["t/k"]
    second = read_answers(write(tmp_path / "b", {"w": 0, "z": 0, "y": 1, "x": 0}))["t/k"]
    found = compare("t/k", first, second, NAMES)
    assert (found.count, found.first, found.second, found.only_first, found.only_second) == (4, 0.75, 0.25, 2, 0)
    assert found.p == 0.5 and found.low <= 0.5 <= found.high
    shares = read_answers(write(tmp_path / "c", {"x": 0.25, "y": 1, "z": 0, "w": 1}))["t/k"]
    assert compare("t/k", first, shares, NAMES).p is None


def test_equal_prompts_are_paired_in_their_order(tmp_path: Path) -> None:
    first = read_answers(write(tmp_path / "a", {"x": 1, "x'": 0}))["t/k"]
    second = read_answers(write(tmp_path / "b", {"x": 1, "x'": 0}))["t/k"]
    assert len(first) == 2 and compare("t/k", first, second, NAMES).only_first == 0


def test_other_items_are_refused(tmp_path: Path) -> None:
    first = read_answers(write(tmp_path / "a", {"x": 1, "y": 1, "z": 0}))["t/k"]
    second = read_answers(write(tmp_path / "b", {"x": 1, "u": 1}))["t/k"]
    with pytest.raises(
        ValueError, match="t/k: 2 items only of a/sft and 1 items only of b/sft: evaluate both with the"
    ):
        compare("t/k", first, second, NAMES)
    (tmp_path / "a/k.answers.jsonl").write_text('{"task": "t"}\n{"item": 0}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="k.answers.jsonl is damaged .*: remove it and evaluate again"):
        read_answers(tmp_path / "a")


def test_the_command_compares_runs_and_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, llama_recipe(context=128))
    copa = [{"query": f"{n} and", "choices": ["one", "two"], "gold": n % 2} for n in range(9)]
    (tmp_path / "copa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copa), encoding="utf-8")
    own = ["--tasks", "tinyworld", "core", "--bundle", str(tmp_path), "--questions", "4", "--stage", "pretrain"]
    assert main.main(["evaluate", "--out", str(tmp_path), *PLAIN, *own]) == 0
    shutil.copytree(run_dir.folder, tmp_path / "runs/second")
    path = tmp_path / "runs/second/answers/pretrain/tinyworld/choice.answers.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert lines[0]["task"] == "tinyworld/choice" and len(lines) == 5
    for line in lines[1:]:
        line["score"] = 1 - line["score"]
    path.write_text("".join(json.dumps(line) + "\n" for line in [lines[0], *lines[:0:-1]]), encoding="utf-8")
    capsys.readouterr()
    runs = ["runs", "--out", str(tmp_path), "compare"]
    assert main.main([*runs, "first", "second"]) == 0
    table = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {"core/copa", "tinyworld/facts", "tinyworld/choice"} <= table.keys()
    records = [json.loads(line) for line in (run_dir.folder / "comparisons.jsonl").read_text("utf-8").splitlines()]
    by_task = {record["task"]: record for record in records}
    choice, core = by_task["tinyworld/choice"], by_task["core/copa"]
    assert choice["only_first"] + choice["only_second"] == 4 and choice["count"] == 4
    assert core["count"] == 9 and core["p"] == 1.0 and core["only_first"] == core["only_second"] == 0
    (tmp_path / "runs/second/answers/pretrain/core/copa.answers.jsonl").unlink()
    assert main.main([*runs, "first", "second/pretrain"]) == 0
    assert "not compared: core/copa" in capsys.readouterr().out
    assert main.main([*runs, "first", "second/sft"]) == 0
    assert (
        "answers: run 'second' has no answers of stage sft yet: `quern evaluate --run second" in capsys.readouterr().out
    )
    shutil.rmtree(tmp_path / "runs/second/answers/pretrain/tinyworld")
    shutil.copytree(
        run_dir.answers("pretrain") / "core", tmp_path / "runs/second/answers/pretrain/core", dirs_exist_ok=True
    )
    shutil.rmtree(run_dir.answers("pretrain") / "core")
    for names, message in {
        ("none", "first"): "there is no run 'none'",
        ("first", "first"): "first and first are the same model: name another run, or RUN/STAGE",
        ("first", "second"): "the runs share no task: evaluate both with the same --tasks",
    }.items():
        assert main.main([*runs, *names]) == 1
        assert message in capsys.readouterr().err
