"""Law: scores at batch 1 = scores at batch N, and scores = those of an independent scorer.

The independent scorer takes one window at a time, full logits, and NumPy in float64.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from quern.data.loader import Batch
from quern.data.packing import windows
from quern.eval import likelihood
from quern.eval.bits_per_byte import bits_per_byte
from quern.eval.likelihood import choice_example, score_examples
from quern.eval.run_task import run_task
from quern.eval.task import TINYWORLD
from quern.generate.engine import Engine
from tests.support.memory_corpus import memory_corpus
from tests.support.tiny_model import CPU, TEXTS, plain_bits_per_byte, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("eager")

CONTEXT = 24
TOKENIZER = tiny_tokenizer()
BATCHES = (1, 3, 32)


@pytest.fixture(scope="module")
def model():
    return tiny_model(TOKENIZER.vocab_size, CONTEXT)


def batches(rows: int) -> Iterator[Batch]:
    corpus = memory_corpus([[TOKENIZER.bos, *TOKENIZER.encode(text)] for text in TEXTS])
    return windows(corpus, CONTEXT, rows=rows, multiple=8)


def test_bits_per_byte(model, law):
    measured = [bits_per_byte(model, batches(rows), TOKENIZER.token_bytes(), CPU) for rows in BATCHES]
    plain = plain_bits_per_byte(model, TOKENIZER, TEXTS, CONTEXT)
    assert {(one.tokens, one.bytes) for one in measured} == {(plain.tokens, plain.bytes)}
    among = max(abs(one.bpb / measured[0].bpb - 1) for one in measured)
    to_plain = max(abs(one.bpb / plain.bpb - 1) for one in measured)
    law("bits per byte at batch 1 = at batch N", among, 1e-6, "relative")
    law("bits per byte = an independent NumPy scorer's", to_plain, 1e-6, "relative")


def test_multiple_choice(model, law, monkeypatch):
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(20):
        prompt = [TOKENIZER.bos, *rng.integers(0, 256, rng.integers(1, 20)).tolist()]
        choices = [rng.integers(0, 256, rng.integers(1, 5)).tolist() for _ in range(3)]
        examples.append(choice_example(prompt, choices, 0, CONTEXT))
    scored = []
    for batch_tokens in (8, 100, 8192):
        monkeypatch.setattr(likelihood, "BATCH_TOKENS", batch_tokens)
        answers = score_examples(model, examples, CPU, TOKENIZER.vocab_size)
        scored.append([answer.nats(example) for answer, example in zip(answers, examples, strict=True)])
    nats = [np.concatenate(one) for one in scored]
    deviation = max(float(np.abs(one / nats[0] - 1).max()) for one in nats)
    law("likelihood of a choice at batch 1 = at batch N", deviation, 1e-5, "relative, choices equal")
    picks = [[int(losses.argmin()) for losses in one] for one in scored]
    assert all(picked == picks[0] for picked in picks)


def test_generated_answers(law, monkeypatch):
    engine = Engine(tiny_model(TOKENIZER.vocab_size, 256), TOKENIZER, CPU)
    asked = [item for item in TINYWORLD.items(1, 6) if item.kind in ("facts", "counting")]
    task = replace(TINYWORLD, items=lambda seed, count: asked, max_tokens=24)
    found = []
    for rows in BATCHES:
        monkeypatch.setattr("quern.eval.run_task.BATCH_ROWS", rows)
        found.append([run_task(engine, task, base=base) for base in (False, True)])
    (_, graded), (_, of_base) = found[0]
    assert len({reply.text for reply in graded}) > 1 and graded != of_base
    law("generated answers at batch 1 = at batch N", all(one == found[0] for one in found))


def test_a_uniform_model_scores_the_logarithm_of_its_vocabulary(law):
    """An oracle by hand: with a head of zeros every token costs ln V."""
    model = tiny_model(TOKENIZER.vocab_size, CONTEXT)
    torch.nn.init.zeros_(model.head.weight)
    measured = bits_per_byte(model, batches(3), TOKENIZER.token_bytes(), CPU)
    deviation = abs(measured.nats_per_token / math.log(TOKENIZER.vocab_size) - 1)
    law("bits per byte of a uniform model = log2 V a token", deviation, 1e-6, "relative")
    assert measured.uniform_bpb(TOKENIZER.vocab_size) == pytest.approx(measured.bpb)
