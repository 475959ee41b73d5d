"""Wilson's interval against SciPy's, and what identifies an evaluation."""

import json
from dataclasses import asdict

import pytest
from scipy.stats import binomtest

from quern.eval.score import Prompts, Score, accuracy, wilson


@pytest.mark.parametrize(("correct", "count"), [(0, 1), (1, 1), (0, 200), (200, 200), (3, 7), (91, 200), (5, 1000)])
def test_wilson_equals_scipy(correct, count):
    expected = binomtest(correct, count).proportion_ci(0.95, method="wilson")
    assert wilson(correct, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_of_nothing_and_of_nonsense():
    assert wilson(0, 0) == (0.0, 1.0)
    for correct, count in ((2, 1), (-1, 4)):
        with pytest.raises(ValueError, match="between 0 and count"):
            wilson(correct, count)


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
