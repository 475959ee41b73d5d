"""Bits per byte: what counts, and the scores of each kind of text and of a sample of the training text."""

import math

import numpy as np
import pytest

from quern.data.loader import Batch
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import BitsPerByte, bits_per_byte, kinds_of_documents, sample, text_scores
from quern.text.tinyworld.corpus import KINDS_OF_TEXT, documents, documents_of_kinds
from tests.support.memory_corpus import memory_corpus
from tests.support.tiny_model import CPU, TEXTS, plain_bits_per_byte, tiny_model, tiny_tokenizer

KINDS = ["mill", "other", "other", "mill", "", "mill", "other"]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def model(tokenizer):
    return tiny_model(tokenizer.vocab_size)


def corpus_of(tokenizer, texts: list[str]) -> Corpus:
    return memory_corpus([[tokenizer.bos, *tokenizer.encode(text)] for text in texts])


def test_each_kind_has_the_score_of_its_documents_and_the_whole_that_of_all(tokenizer, model):
    val, train = corpus_of(tokenizer, TEXTS), corpus_of(tokenizer, TEXTS[::-1])
    found = text_scores(model, tokenizer, CPU, val, train, kinds=KINDS, context=16, rows=4)
    assert [score.task for score in found] == ["validation", "train", "validation/mill", "validation/other"]
    for score in found:
        kind = score.task.rpartition("/")[2]
        texts = [text for text, own in zip(TEXTS, KINDS, strict=True) if kind in ("validation", "train", own)]
        plain = plain_bits_per_byte(model, tokenizer, texts, 16)
        assert score.value == pytest.approx(plain.bpb, rel=1e-6) and score.count == plain.bytes
        assert plain.bytes == sum(len(text.encode()) for text in texts)
        assert score.chance == pytest.approx(plain.tokens * math.log2(tokenizer.vocab_size) / plain.bytes)
    (only,) = text_scores(model, tokenizer, CPU, val, context=16, rows=4)
    assert only.task == "validation" and only.value == pytest.approx(found[0].value, rel=1e-6)


@pytest.mark.parametrize(("tokens", "lengths"), [(1000, 300), (7, 1), (40, 300), (10**6, 3), (500, 1)])
def test_a_sample_is_all_over_the_text_and_no_larger_than_asked(tokens: int, lengths: int) -> None:
    draw = np.random.default_rng(0)
    corpus = memory_corpus([[0, *range(1, 2 + draw.integers(lengths))] for _ in range(400)])
    first, second = sample(corpus, tokens), sample(corpus, tokens)
    assert first.num_tokens <= tokens and first.num_tokens >= min(0.5 * tokens, 0.98 * corpus.num_tokens)
    assert (first.starts == second.starts).all() and (first.lengths == second.lengths).all()
    assert set(first.starts) <= set(corpus.starts) and corpus.num_tokens == sample(corpus, 10**6).num_tokens
    if tokens == 1000:
        assert first.starts.max() > 0.7 * corpus.starts.max()
    cut = sample(memory_corpus([[0, *range(1, 500)]]), 60)
    assert cut.gather(0).tolist() == list(range(60)), "one long document is cut"


def test_documents_of_the_world_are_known_by_their_text(tokenizer):
    pairs = list(documents_of_kinds(3, 0.02, "val"))
    assert [text for _, text in pairs] == list(documents(3, 0.02, "val"))
    assert {kind for kind, _ in pairs} <= set(KINDS_OF_TEXT)
    texts = [text for _, text in pairs[:6]]
    corpus = corpus_of(tokenizer, [*texts, "changed"])
    assert kinds_of_documents(corpus, tokenizer, pairs) == [*(kind for kind, _ in pairs[:6]), ""]


def test_special_tokens_masked_targets_and_padding_count_on_neither_side(tokenizer, model):
    bos, end, ids = tokenizer.bos, tokenizer.special("<|assistant_end|>"), tokenizer.encode("the corn")
    row = np.array([[bos, *ids, end, bos, *ids]])

    def measured(row: np.ndarray, mask: np.ndarray) -> BitsPerByte:
        return bits_per_byte(model, [Batch(row[:, :-1], row[:, 1:], mask)], tokenizer.token_bytes(), CPU)

    everything = np.ones((1, row.shape[1] - 1), dtype=bool)
    text_only, first = everything.copy(), np.arange(row.shape[1] - 1)[None] < len(ids)
    text_only[0, len(ids) : len(ids) + 2] = False
    whole = measured(row, everything)
    assert whole == measured(row, text_only) and (whole.tokens, whole.bytes) == (2 * len(ids), 16)
    part = measured(row, first)
    row[:, len(ids) + 1 :] = 3
    assert part == measured(row, first) and part.bytes == 8, "what padding holds does not matter"


def test_nothing_to_measure_is_refused(tokenizer, model):
    row = np.full((1, 4), tokenizer.bos)
    only_special = Batch(row[:, :-1], row[:, 1:], np.ones((1, 3), dtype=bool))
    for batches in ([], [only_special]):
        with pytest.raises(ValueError, match="at least one target that stands for text"):
            bits_per_byte(model, batches, tokenizer.token_bytes(), CPU)
