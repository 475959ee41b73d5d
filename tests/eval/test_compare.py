"""Scores with their intervals, and two runs compared item by item: against known values and SciPy's."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from quern.eval.answers import answers_file, compare, paired_bootstrap, read_answers, write_answers
from quern.eval.score import Prompts, Score, accuracy, mean_score, wilson
from tests.support.rows import write_rows

NAMES = ("a/sft", "b/sft")


def write(folder: Path, scores: dict[str, float], task: str = "t/k") -> Path:
    lines = [{"item": n, "prompt": name.strip("'"), "score": score} for n, (name, score) in enumerate(scores.items())]
    return write_rows(folder / "k.answers.jsonl", [{"task": task}, *lines]).parent


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (121, 59, 2 * sum(math.comb(180, right) for right in range(60)) / 2**180),
        (2, 10, 2 * (1 + 12 + 66) / 2**12),
        (0, 0, 1.0),
    ],
)
def test_the_p_value_is_exact(only_first: int, only_second: int, p: float) -> None:
    pairs = [(1.0, 0.0)] * only_first + [(0.0, 1.0)] * only_second + [(1.0, 1.0)]
    first, second = ({("x", number): score for number, score in enumerate(own)} for own in zip(*pairs, strict=True))
    assert compare("t/k", first, second, NAMES).p == pytest.approx(p, rel=1e-9)


def test_the_bootstrap_agrees_with_theory() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, 400)
    low, high = paired_bootstrap(values)
    error = values.std() / math.sqrt(400)
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)
    assert paired_bootstrap(values) == (low, high)
    for equal in ([0.5] * 9, [0.5], [0.0] * 200):
        assert paired_bootstrap(equal) == (None, None), "it would be certain of a handful of items"


def test_every_kind_has_a_file_of_its_own(tmp_path: Path) -> None:
    kinds = ("C++", "C#", "C_", "", ".", "_", "ö" * 300, "ö" * 301)
    for kind in kinds:
        write_answers(answers_file(tmp_path, "code", kind), {"task": f"code/{kind}"}, [])
    assert read_answers(tmp_path).keys() == {f"code/{kind}" for kind in kinds}
    assert answers_file(tmp_path, "core", "arc_easy") == tmp_path / "core" / "arc_easy.answers.jsonl"


def test_items_are_paired_by_their_prompt(tmp_path: Path) -> None:
    first = read_answers(write(tmp_path / "a", {"x": 1, "y": 1, "z": 0, "w": 1}))["t/k"]
    second = read_answers(write(tmp_path / "b", {"w": 0, "z": 0, "y": 1, "x": 0}))["t/k"]
    found = compare("t/k", first, second, NAMES)
    assert (found.count, found.first, found.second, found.only_first, found.only_second) == (4, 0.75, 0.25, 2, 0)
    assert found.p == 0.5 and found.low is not None and found.high is not None and found.low <= 0.5 <= found.high
    shares = read_answers(write(tmp_path / "c", {"x": 0.25, "y": 1, "z": 0, "w": 1}))["t/k"]
    assert compare("t/k", first, shares, NAMES).p is None
    twice = read_answers(write(tmp_path / "d", {"x": 1, "x'": 0}))["t/k"]
    assert len(twice) == 2 and compare("t/k", twice, twice, NAMES).only_first == 0, "equal ones in their order"


@pytest.mark.parametrize(("correct", "count"), [(0, 1), (1, 1), (0, 200), (200, 200), (3, 7), (91, 200), (5, 1000)])
def test_wilson_equals_scipy(correct, count):
    expected = binomtest(correct, count).proportion_ci(0.95, method="wilson")
    assert wilson(correct, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_mean_of_tasks_without_a_right_answer_has_no_interval():
    none, half = accuracy("a", [False] * 20, [0.0] * 20), accuracy("b", [True, False] * 10, [0.0] * 20)
    alone, both = mean_score("mean", [(none, 0.0), (none, 0.0)]), mean_score("mean", [(none, 0.0), (half, 0.25)])
    assert (alone.value, alone.low, alone.high) == (0.0, None, None)
    assert mean_score("mean", [(accuracy("c", [True] * 9 + [False], [0.0] * 10), 0.0)]).high == 1.0
    error = (0.25 / 20) ** 0.5 / 0.75 / 2
    assert (both.low, both.high) == pytest.approx((1 / 6 - 1.959964 * error, 1 / 6 + 1.959964 * error))


def test_accuracy_says_what_was_asked():
    settings = Prompts(9, [[9, 1], [9, 2]]).settings()
    score = accuracy("sums", [True, False, True, True], [0.0, 0.5, 0.25, 0.25], shots=2, **settings)
    assert (score.value, score.count, score.chance, score.bos, score.shots) == (0.75, 4, 0.25, True, 2)
    assert score.low is not None and score.high is not None and score.low < 0.75 < score.high
    assert not Prompts(9, [[1, 9]]).settings()["bos"]
    assert Score(**json.loads(json.dumps(asdict(score)))) == score
    assert accuracy("sums", [], [], skipped=3) == Score("sums", "accuracy", None, None, None, 0, None, skipped=3)


def test_prompt_hash_tells_prompts_apart():
    cases = [[[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[1, 2, 3]], [[1, 2], [3], []]]
    assert len({Prompts(1, case).settings()["prompt_hash"] for case in cases}) == len(cases)
    in_parts = Prompts(1, [(1, 2)])
    in_parts.add([(3,)])
    assert in_parts.settings() == Prompts(1, [[1, 2], [3]]).settings()
