"""Bits per byte of each kind of text and of a sample of the training text, against scores of those texts alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from quern.cli import main
from quern.data.pieces import windows
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import bits_per_byte, kinds_of_documents, sample, text_scores
from quern.text.tinyworld.corpus import KINDS_OF_TEXT, documents, documents_of_kinds
from tests.support.llama_run import llama_recipe, write_run
from tests.support.tiny_model import CPU, TEXTS, plain_bits_per_byte, tiny_model, tiny_tokenizer

KINDS = ["mill", "other", "other", "mill", "", "mill", "other"]


def corpus_of(tokenizer, texts: list[str]) -> Corpus:
    return Corpus.from_arrays([[tokenizer.bos, *tokenizer.encode(text)] for text in texts])


def test_each_kind_has_the_score_of_its_documents_and_the_whole_that_of_all() -> None:
    tokenizer = tiny_tokenizer()
    model, val = tiny_model(tokenizer.vocab_size), corpus_of(tokenizer, TEXTS)
    train = corpus_of(tokenizer, TEXTS[::-1])
    found = text_scores(model, tokenizer, CPU, val, train, kinds=KINDS, context=16, rows=4)
    assert [score.task for score in found] == ["validation", "train", "validation/mill", "validation/other"]
    for score in found:
        kind = score.task.rpartition("/")[2]
        texts = [text for text, own in zip(TEXTS, KINDS, strict=True) if kind in ("validation", "train", own)]
        plain = plain_bits_per_byte(model, tokenizer, texts, 16)
        assert score.value == pytest.approx(plain.bpb, rel=1e-6) and score.count == plain.bytes
        assert score.chance == pytest.approx(plain.uniform_bpb(tokenizer.vocab_size))
    whole = bits_per_byte(model, windows(val, 16), tokenizer.token_bytes(), CPU)
    assert found[0].value == pytest.approx(whole.bpb, rel=1e-6)
    (only,) = text_scores(model, tokenizer, CPU, val, context=16, rows=4)
    assert only.task == "validation" and only.value == pytest.approx(whole.bpb, rel=1e-6)


@pytest.mark.parametrize(("tokens", "lengths"), [(1000, 300), (7, 1), (40, 300), (10**6, 3), (500, 1)])
def test_a_sample_is_all_over_the_text_and_no_larger_than_asked(tokens: int, lengths: int) -> None:
    draw = np.random.default_rng(0)
    corpus = Corpus.from_arrays([[0, *range(1, 2 + draw.integers(lengths))] for _ in range(400)])
    first, second = sample(corpus, tokens), sample(corpus, tokens)
    assert first.num_tokens <= tokens and first.num_tokens >= min(0.5 * tokens, 0.98 * corpus.num_tokens)
    assert (first.starts == second.starts).all() and (first.lengths == second.lengths).all()
    assert set(first.starts) <= set(corpus.starts) and corpus.num_tokens == sample(corpus, 10**6).num_tokens
    if tokens == 1000:
        assert first.starts.max() > 0.7 * corpus.starts.max()


def test_one_long_document_is_cut() -> None:
    part = sample(Corpus.from_arrays([[0, *range(1, 500)]]), 60)
    assert part.gather(0).tolist() == list(range(60))


def test_documents_of_the_world_are_known_by_their_text() -> None:
    pairs, tokenizer = list(documents_of_kinds(3, 0.02, "val")), tiny_tokenizer()
    assert [text for _, text in pairs] == list(documents(3, 0.02, "val"))
    assert {kind for kind, _ in pairs} <= set(KINDS_OF_TEXT)
    texts = [text for _, text in pairs[:6]]
    corpus = corpus_of(tokenizer, [*texts, "changed"])
    assert kinds_of_documents(corpus, tokenizer, pairs) == [*(kind for kind, _ in pairs[:6]), ""]


def test_the_command_scores_kinds_and_training_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, llama_recipe(context=64))
    plain = "--no-compile --dtype fp32 --threads 1 --device cpu --questions 1".split()
    assert main.main(["evaluate", "--out", str(tmp_path), *plain]) == 0
    path = tmp_path / "runs/first/evaluate.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    of_stage = {
        stage: {line["task"]: line for line in lines if line["stage"] == stage and line["metric"] == "bpb"}
        for stage in ("untrained", "pretrain")
    }
    assert "train" in of_stage["pretrain"] and "train" not in of_stage["untrained"]
    for scores in of_stage.values():
        kinds = [line for name, line in scores.items() if name.startswith("validation/")]
        assert len(kinds) > 4 and sum(line["count"] for line in kinds) == scores["validation"]["count"]
    assert "  validation/stories           bpb " in capsys.readouterr().out
