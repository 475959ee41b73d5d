"""Bits per byte against a second implementation, and on what must not count."""

import math

import numpy as np
import pytest

from quern.data.loader import Batch
from quern.data.pieces import windows
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import BitsPerByte, bits_per_byte
from tests.support.tiny_model import CPU, TEXTS, plain_bits_per_byte, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer.vocab_size)


def corpus(tokenizer) -> Corpus:
    return Corpus.from_arrays([[tokenizer.bos, *tokenizer.encode(text)] for text in TEXTS])


@pytest.mark.parametrize("context", [32, 7, 1])
def test_equals_the_plain_scorer_and_counts_every_byte_once(tokenizer, model, context):
    measured = bits_per_byte(model, windows(corpus(tokenizer), context), tokenizer.token_bytes(), CPU)
    plain = plain_bits_per_byte(model, tokenizer, TEXTS, context)
    assert measured.bytes == plain.bytes == sum(len(text.encode()) for text in TEXTS)
    assert measured.tokens == plain.tokens
    assert measured.bpb == pytest.approx(plain.bpb, rel=1e-6)
    assert measured.nats_per_token == pytest.approx(plain.nats_per_token, rel=1e-6)


def test_bytes_of_printed_tokens_would_be_wrong(tokenizer):
    """The texts hold tokens that are no valid UTF-8; counting their printed form (the known mistake)
    shows.
    """
    ids = [token for text in TEXTS for token in tokenizer.encode(text)]
    printed = sum(len(tokenizer.decode([token]).encode("utf-8")) for token in ids)
    assert int(tokenizer.token_bytes()[ids].sum()) == sum(len(text.encode()) for text in TEXTS) != printed


def test_special_tokens_and_masked_targets_count_on_neither_side(tokenizer, model):
    bos, end = tokenizer.bos, tokenizer.special("<|assistant_end|>")
    ids = tokenizer.encode("the corn")
    row = np.array([[bos, *ids, end, bos, *ids]])
    tokens, targets = row[:, :-1], row[:, 1:]
    everything = np.ones(targets.shape, dtype=bool)
    text_only = everything.copy()
    text_only[0, len(ids) : len(ids) + 2] = False
    table = tokenizer.token_bytes()
    whole = bits_per_byte(model, [Batch(tokens, targets, everything)], table, CPU)
    assert whole == bits_per_byte(model, [Batch(tokens, targets, text_only)], table, CPU)
    assert (whole.tokens, whole.bytes) == (2 * len(ids), 16)
    first = everything.copy()
    first[0, len(ids) :] = False
    assert bits_per_byte(model, [Batch(tokens, targets, first)], table, CPU).bytes == 8


def test_what_padding_holds_does_not_matter(tokenizer, model):
    ids = tokenizer.encode("the corn")
    row = np.array([[tokenizer.bos, *ids, 3, 5]])
    mask = np.arange(row.shape[1] - 1)[None] < len(ids)
    table = tokenizer.token_bytes()
    one = bits_per_byte(model, [Batch(row[:, :-1], row[:, 1:], mask)], table, CPU)
    row[0, -2:] = tokenizer.bos
    other = bits_per_byte(model, [Batch(row[:, :-1], row[:, 1:], mask)], table, CPU)
    assert one == other


def test_nothing_to_measure_is_refused(tokenizer, model):
    row = np.full((1, 4), tokenizer.bos)
    only_special = Batch(row[:, :-1], row[:, 1:], np.ones((1, 3), dtype=bool))
    for batches in ([], [only_special]):
        with pytest.raises(ValueError, match="at least one target that stands for text"):
            bits_per_byte(model, batches, tokenizer.token_bytes(), CPU)


def test_uniform_guess_and_score():
    measured = BitsPerByte.of(nats=100 * math.log(256), tokens=100, num_bytes=100)
    assert measured.bpb == pytest.approx(8.0)
    assert measured.uniform_bpb(256) == pytest.approx(8.0)


def test_the_model_is_left_as_it_was(tokenizer, model):
    model.train()
    before = [parameter.clone() for parameter in model.parameters()]
    bits_per_byte(model, windows(corpus(tokenizer), 16), tokenizer.token_bytes(), CPU)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all((a == b).all() for a, b in zip(before, model.parameters(), strict=True))
