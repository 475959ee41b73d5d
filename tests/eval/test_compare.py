"""Two runs compared item by item: the statistics against known values, and the pairing of items."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from quern.eval.answers import compare, mcnemar, paired_bootstrap, read_answers

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
    twice = read_answers(write(tmp_path / "d", {"x": 1, "x'": 0}))["t/k"]
    assert len(twice) == 2 and compare("t/k", twice, twice, NAMES).only_first == 0, "equal ones in their order"


def test_other_items_are_refused(tmp_path: Path) -> None:
    first = read_answers(write(tmp_path / "a", {"x": 1, "y": 1, "z": 0}))["t/k"]
    second = read_answers(write(tmp_path / "b", {"x": 1, "u": 1}))["t/k"]
    with pytest.raises(
        ValueError, match="t/k: 2 items only of a/sft and 1 items only of b/sft: evaluate both with the"
    ):
        compare("t/k", first, second, NAMES)
