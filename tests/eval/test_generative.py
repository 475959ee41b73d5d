"""Generated answers and the built-in world's tasks, through the real engine with a small random model."""

import numpy as np
import pytest
import torch

from quern.eval.generative import generative
from quern.eval.likelihood import continuation_nats
from quern.eval.tasks.tinyworld import by_letter, tinyworld
from quern.generate.engine import Engine
from quern.model.context import CausalContext
from quern.text.chat import render_prompt
from quern.text.tinyworld.corpus import QUESTION_KINDS, Question, questions
from tests.support.tiny_model import CPU, tiny_model, tiny_tokenizer

CONTEXT = 320


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = tiny_tokenizer()
    return Engine(tiny_model(tokenizer.vocab_size, CONTEXT), tokenizer, CPU)


def short(question: Question, reply: str) -> bool:
    """A check whose outcome depends on every character of the reply and on the question."""
    return (sum(map(ord, reply)) + len(question.answer)) % 2 == 0


def asked(count: int = 5) -> list[Question]:
    return [question for kind in ("facts", "sums") for question in questions(3, kind, count)]


def test_scores_follow_the_check_and_the_kinds(engine):
    graded = generative(engine, asked(), short, task="toy", max_tokens=12)
    assert [score.task for score in graded.scores] == ["toy/facts", "toy/sums"]
    for score, replies in zip(graded.scores, (graded.replies[:5], graded.replies[5:]), strict=True):
        assert [reply.correct for reply in replies] == [
            short(question, reply.text)
            for question, reply in zip(asked()[:5] if score.task == "toy/facts" else asked()[5:], replies, strict=True)
        ]
        assert score.value == sum(reply.correct for reply in replies) / 5
        assert (score.count, score.bos, score.shots) == (5, True, 0)
        assert score.low is not None and score.value is not None and score.high is not None
        assert score.low <= score.value <= score.high
    assert graded.scores[0].prompt_hash != graded.scores[1].prompt_hash
    assert graded.scores[0].chance == np.mean([question.chance for question in asked()[:5]])
    with pytest.raises(ValueError, match="no questions"):
        generative(engine, [], short)


def test_replies_are_the_greedy_ones(engine):
    """Against argmax over uncached logits, for the replies without special tokens."""
    graded = generative(engine, asked(12), short, max_tokens=8)
    compared = 0
    for question, reply in zip(asked(12), graded.replies, strict=True):
        ids = render_prompt(engine.tokenizer, question.messages)
        start = len(ids)
        for _ in range(8):
            with torch.no_grad():
                logits = engine.model.logits(engine.model(torch.tensor([ids]), CausalContext()))
            ids.append(int(logits[0, -1].argmax()))
        new = ids[start:]
        if any(token in engine.tokenizer.special_ids.values() for token in new):
            continue
        compared += 1
        assert reply.text == engine.tokenizer.decode_bytes(new).decode("utf-8", errors="ignore")
    assert compared >= 3


def test_tinyworld_asks_every_kind_the_same_way_every_time(engine):
    one = tinyworld(engine, seed=1, count=4)
    assert [score.task for score in one.scores] == [f"tinyworld/{kind}" for kind in QUESTION_KINDS]
    assert all(score.count == 4 and score.prompt_hash for score in one.scores)
    again = tinyworld(engine, seed=1, count=4, batch_rows=1)
    assert again == one
    other = tinyworld(engine, seed=2, count=4, kinds=("facts",))
    assert other.scores[0].prompt_hash != one.scores[0].prompt_hash


def test_the_letter_picked_is_the_likeliest(engine):
    items = questions(5, "choice", 6)
    graded = by_letter(engine, items)
    assert graded.scores[0].chance == pytest.approx(items[0].chance)
    for question, reply in zip(items, graded.replies, strict=True):
        assert question.choices is not None
        prompt = render_prompt(engine.tokenizer, question.messages)
        nats = [
            continuation_nats(engine.model, [(prompt, engine.tokenizer.encode(letter))], CPU, context=CONTEXT)[0]
            for letter in question.choices
        ]
        assert reply.text == question.choices[int(np.argmin(nats))]
        assert reply.correct == (reply.text == question.answer)
