"""The losses of choices against a plain computation; cropping, and what is refused."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quern.eval.likelihood import choice_example, score_examples
from quern.model.context import CausalContext
from tests.support.tiny_model import CPU, tiny_model

BOS = 99
CONTEXT = 32


@pytest.fixture(scope="module")
def model():
    return tiny_model(100, CONTEXT)


def plain_nats(model, prompt, continuation) -> float:
    ids = torch.tensor([[*prompt, *continuation]])
    with torch.no_grad():
        logprobs = model.logits(model(ids[:, :-1], CausalContext()))[0].double().log_softmax(-1)
    positions = range(len(prompt) - 1, ids.size(1) - 1)
    return -sum(float(logprobs[at, ids[0, at + 1]]) for at in positions)


def nats_of(model, asked: Sequence[tuple[list[int], Sequence[list[int]]]]) -> list[np.ndarray]:
    made = [choice_example(prompt, ids, 0, CONTEXT) for prompt, ids in asked]
    examples = [one for one in made if one is not None]
    answers = score_examples(model, examples, CPU, 100)
    return [answer.nats(example) for answer, example in zip(answers, examples, strict=True)]


def test_a_long_prompt_keeps_its_bos_and_its_end(model):
    prompt, continuations = [BOS, *range(60)], ([7, 8], [9], [1, 2, 3])
    measured = nats_of(model, [(prompt, continuations)])[0]
    for ids, nats in zip(continuations, measured, strict=True):
        cropped = [BOS, *prompt[-(CONTEXT - len(ids)) :]]
        assert len(cropped) + len(ids) == CONTEXT + 1
        assert nats == pytest.approx(plain_nats(model, cropped, ids), rel=2e-6)


def test_what_cannot_be_scored_is_refused(model):
    assert nats_of(model, [([BOS], [list(range(33))])]) == []
    assert nats_of(model, [([BOS], [list(range(32))])])[0] > 0
    for question in (([], [[1]]), ([BOS], [[]])):
        with pytest.raises(ValueError, match="at least one token"):
            nats_of(model, [question])
