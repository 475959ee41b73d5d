"""Multiple choice: losses against a plain computation, lengths, cropping, and the choice itself."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quern.eval.likelihood import (
    MultipleChoice,
    continuation_nats,
    letter_nats,
    multiple_choice,
    per_byte,
    whole,
)
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


def pairs(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        (
            [BOS, *rng.integers(0, 99, rng.integers(0, 20)).tolist()],
            rng.integers(0, 99, rng.integers(1, 9)).tolist(),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("batch_rows", [1, 4, 64])
def test_losses_equal_the_plain_ones_in_any_batch(model, batch_rows):
    asked = pairs(13)
    expected = [plain_nats(model, prompt, continuation) for prompt, continuation in asked]
    measured = continuation_nats(model, asked, CPU, context=CONTEXT, batch_rows=batch_rows)
    np.testing.assert_allclose(measured, expected, rtol=2e-6)


def test_a_long_prompt_keeps_its_bos_and_its_end(model):
    prompt, continuation = [BOS, *range(60)], [7, 8]
    cropped = [BOS, *prompt[-(CONTEXT + 1 - 2 - 1) :]]
    assert len(cropped) + len(continuation) == CONTEXT + 1
    measured = continuation_nats(model, [(prompt, continuation)], CPU, context=CONTEXT)
    assert measured[0] == pytest.approx(plain_nats(model, cropped, continuation), rel=1e-6)


@pytest.mark.parametrize("batch_rows", [1, 5, 64])
def test_letters_are_read_off_one_row_per_question(model, batch_rows):
    """Unequal prompts, one of them longer than the context: the losses of one row per choice."""
    prompts = [prompt for prompt, _ in pairs(13)] + [[BOS, *range(60)]]
    letters = ([3], [70], [8])
    items = [MultipleChoice("toy", prompt, ("A", "B", "C"), letters, 0) for prompt in prompts]
    measured = letter_nats(model, items, CPU, task="toy", context=CONTEXT, batch_rows=batch_rows)
    asked = [(prompt, ids) for prompt in prompts for ids in letters]
    np.testing.assert_allclose(measured, continuation_nats(model, asked, CPU, context=CONTEXT), rtol=2e-6)


def test_what_cannot_be_scored_is_refused(model):
    with pytest.raises(ValueError, match="does not fit a context of 32"):
        continuation_nats(model, [([BOS], list(range(33)))], CPU, context=CONTEXT)
    assert continuation_nats(model, [([BOS], list(range(32)))], CPU, context=CONTEXT)[0] > 0
    for pair in (([], [1]), ([BOS], [])):
        with pytest.raises(ValueError, match="at least one token"):
            continuation_nats(model, [pair], CPU, context=CONTEXT)


def per_token(text: str, ids: Sequence[int]) -> float:
    return float(len(ids))


def test_choice_interval_chance_and_lengths(model):
    rng = np.random.default_rng(3)
    items = []
    for _ in range(12):
        texts = tuple("x" * int(n) for n in rng.integers(1, 7, 4))
        ids = tuple(rng.integers(0, 99, len(text)).tolist() for text in texts)
        items.append(MultipleChoice("toy", [BOS, *rng.integers(0, 99, 5).tolist()], texts, ids, int(rng.integers(4))))
    picks = {}
    for length in (whole, per_token):
        score, picks[length] = multiple_choice(
            model, items, CPU, task="toy", bos=BOS, context=CONTEXT, length=length, batch_rows=5
        )
        for item, pick in zip(items, picks[length], strict=True):
            costs = [plain_nats(model, item.prompt, ids) / length("", ids) for ids in item.continuations]
            assert pick == int(np.argmin(costs))
        hits = sum(pick == item.correct for pick, item in zip(picks[length], items, strict=True))
        assert (score.value, score.count, score.chance) == (hits / 12, 12, 0.25)
        assert score.bos and score.prompt_hash and score.cropped == 0
    assert picks[whole] != picks[per_token]
    assert per_byte("é", [1, 2, 3]) == 2.0
