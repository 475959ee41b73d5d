"""A context too short for some questions, or for all: skipped questions are counted, and evaluation goes on."""

import json
from pathlib import Path

import pytest

from quern.cli import main
from quern.eval.run_task import run_task
from quern.eval.tasks.tinyworld import TASK
from quern.generate.engine import Engine
from quern.text.chat import render_prompt
from quern.text.tinyworld.corpus import QUESTION_KINDS, questions
from tests.support.llama_run import llama_recipe, write_run
from tests.support.tiny_model import CPU, tiny_model, tiny_tokenizer
from tests.support.toy_engine import toy_tokenizer

COUNT = 6


def test_questions_that_do_not_fit_are_counted_and_the_others_scored() -> None:
    tokenizer = tiny_tokenizer()
    lengths = {
        kind: [len(render_prompt(tokenizer, q.messages)) for q in questions(0, kind, COUNT)] for kind in QUESTION_KINDS
    }
    context = sorted(lengths["facts"])[COUNT // 2]
    engine = Engine(tiny_model(tokenizer.vocab_size, context), tokenizer, CPU)
    graded = run_task(engine, TASK, count=COUNT)
    assert [score.task for score in graded.scores] == [f"tinyworld/{kind}" for kind in QUESTION_KINDS]
    for kind, score in zip(QUESTION_KINDS, graded.scores, strict=True):
        fitting = sum(length + 1 <= context for length in lengths[kind])
        assert (score.count, score.skipped) == (fitting, COUNT - fitting), kind
        assert (score.value is None) == (fitting == 0)
        assert sum(reply.item.kind == kind for reply in graded.replies) == fitting
    counts = {score.count for score in graded.scores}
    assert 0 in counts and len(counts) > 2  # some fit, none, all but a few


def test_a_score_over_fewer_questions_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = sorted(len(render_prompt(toy_tokenizer(), q.messages)) for q in questions(0, "sums", COUNT))
    context = lengths[COUNT // 2]
    fitting = sum(length < context for length in lengths)
    assert 0 < fitting < COUNT, lengths
    write_run(tmp_path, llama_recipe(context=context))
    assert (
        main.main(f"evaluate --out {tmp_path} --questions {COUNT} --no-compile --dtype fp32 --threads 1".split()) == 0
    )
    shown = capsys.readouterr().out
    assert f"; asked {fitting} of {COUNT} questions, the others do not fit a context of {context} tokens" in shown


def test_a_run_whose_context_holds_no_question_is_evaluated_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, llama_recipe(context=4))
    flags = f"evaluate --out {tmp_path} --questions 2 --no-compile --dtype fp32 --threads 1 --device cpu"
    assert main.main(flags.split()) == 0
    shown = capsys.readouterr().out
    assert "tinyworld/sums               not measured: none of its 2 questions fits a context of 4 tokens" in shown
    lines = [json.loads(line) for line in (tmp_path / "runs/first/evaluate.jsonl").read_text("utf-8").splitlines()]
    (sums,) = [line for line in lines if line["task"] == "tinyworld/sums"]
    assert (sums["value"], sums["count"], sums["skipped"]) == (None, 0, 2)
    assert [line["value"] > 0 for line in lines if line["task"] == "validation"] == [True, True]
    assert main.main(["report", "--out", str(tmp_path)]) == 0
