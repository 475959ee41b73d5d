"""Multiple choice: losses against a plain computation, lengths, cropping, and the choice itself."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quern.eval import likelihood
from quern.eval.likelihood import MultipleChoice, choice_nats, multiple_choice, per_byte, whole
from quern.model.context import CausalContext
from tests.support.tiny_model import CPU, tiny_model

BOS = 99
CONTEXT = 32
HOW = {"task": "toy", "context": CONTEXT, "vocab_size": 100}


@pytest.fixture(scope="module")
def model():
    return tiny_model(100, CONTEXT)


def plain_nats(model, prompt, continuation) -> float:
    ids = torch.tensor([[*prompt, *continuation]])
    with torch.no_grad():
        logprobs = model.logits(model(ids[:, :-1], CausalContext()))[0].double().log_softmax(-1)
    positions = range(len(prompt) - 1, ids.size(1) - 1)
    return -sum(float(logprobs[at, ids[0, at + 1]]) for at in positions)


def pairs(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        (
            [BOS, *rng.integers(0, 99, rng.integers(0, 20)).tolist()],
            rng.integers(0, 99, rng.integers(1, 9)).tolist(),
        )
        for _ in range(count)
    ]


def items(questions: Sequence[tuple[list[int], Sequence[list[int]]]]) -> list[MultipleChoice]:
    return [MultipleChoice("toy", prompt, tuple("x" for _ in ids), tuple(ids), 0) for prompt, ids in questions]


@pytest.mark.parametrize("batch_tokens", [8, 100, 8192])
def test_losses_equal_the_plain_ones_in_any_batch(model, batch_tokens: int, monkeypatch: pytest.MonkeyPatch):
    """Also of letters: continuations of one token. The first prompt is BOS alone."""
    monkeypatch.setattr(likelihood, "BATCH_TOKENS", batch_tokens)
    asked = [([BOS], [[4, 5], [6]]), *((prompt, [ids, ids[:1], [3]]) for prompt, ids in pairs(13))]
    measured = choice_nats(model, items(asked), CPU, **HOW)
    for (prompt, continuations), nats in zip(asked, measured, strict=True):
        np.testing.assert_allclose(nats, [plain_nats(model, prompt, ids) for ids in continuations], rtol=2e-6)


def test_a_long_prompt_keeps_its_bos_and_its_end(model):
    prompt, continuations = [BOS, *range(60)], ([7, 8], [9], [1, 2, 3])
    measured = choice_nats(model, items([(prompt, continuations)]), CPU, **HOW)[0]
    for ids, nats in zip(continuations, measured, strict=True):
        cropped = [BOS, *prompt[-(CONTEXT - len(ids)) :]]
        assert len(cropped) + len(ids) == CONTEXT + 1
        assert nats == pytest.approx(plain_nats(model, cropped, ids), rel=2e-6)


def test_what_cannot_be_scored_is_refused(model):
    with pytest.raises(ValueError, match="does not fit a context of 32"):
        choice_nats(model, items([([BOS], [list(range(33))])]), CPU, **HOW)
    assert choice_nats(model, items([([BOS], [list(range(32))])]), CPU, **HOW)[0] > 0
    for question in (([], [[1]]), ([BOS], [[]])):
        with pytest.raises(ValueError, match="at least one token"):
            choice_nats(model, items([question]), CPU, **HOW)


def per_token(text: str, ids: Sequence[int]) -> float:
    return float(len(ids))


def test_choice_interval_chance_and_lengths(model):
    rng = np.random.default_rng(3)
    asked = []
    for _ in range(12):
        texts = tuple("x" * int(n) for n in rng.integers(1, 7, 4))
        ids = tuple(rng.integers(0, 99, len(text)).tolist() for text in texts)
        asked.append(MultipleChoice("toy", [BOS, *rng.integers(0, 99, 5).tolist()], texts, ids, int(rng.integers(4))))
    picks = {}
    for length in (whole, per_token):
        score, picks[length] = multiple_choice(model, asked, CPU, bos=BOS, length=length, **HOW)
        for item, pick in zip(asked, picks[length], strict=True):
            costs = [plain_nats(model, item.prompt, ids) / length("", ids) for ids in item.continuations]
            assert pick == int(np.argmin(costs))
        hits = sum(pick == item.correct for pick, item in zip(picks[length], asked, strict=True))
        assert (score.value, score.count, score.chance) == (hits / 12, 12, 0.25)
        assert score.bos and score.prompt_hash and score.cropped == 0
    assert picks[whole] != picks[per_token]
    assert per_byte("é", [1, 2, 3]) == 2.0
