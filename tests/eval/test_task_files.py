"""Tasks, texts and CORE through the real evaluate stage, with small random models; contexts too short for questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from quern.cli import main
from quern.eval.run_task import run_task
from quern.eval.task import CHAT_STAGES
from quern.eval.tasks import load_task
from quern.eval.tasks.tinyworld import TASK
from quern.generate.engine import Engine
from quern.recipe import Resolved
from quern.text.chat import render_prompt
from quern.text.tinyworld.corpus import QUESTION_KINDS, questions
from tests.support.llama_run import llama_recipe, write_run
from tests.support.tiny_model import CPU, tiny_model, tiny_tokenizer

CAPITALS = Path(__file__).parents[2] / "experiments" / "task_capitals.py"
PLAIN = "--no-compile --dtype fp32 --threads 1 --device cpu".split()
COUNT = 6


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    write_run(folder, llama_recipe(context=128))
    return folder


def evaluate(out: Path, *flags: str) -> list[dict[str, Any]]:
    """The lines that a call adds to evaluate.jsonl."""
    path = out / "runs/first/evaluate.jsonl"
    before = len(path.read_text("utf-8").splitlines()) if path.exists() else 0
    assert main.main(["evaluate", "--out", str(out), *PLAIN, *flags]) == 0
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()[before:]]


def test_texts_and_questions_of_every_model(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = evaluate(out, "--questions", "1")
    assert "  validation/stories           bpb " in capsys.readouterr().out
    texts = {
        stage: {line["task"]: line["count"] for line in lines if line["stage"] == stage and line["metric"] == "bpb"}
        for stage in ("untrained", "pretrain")
    }
    assert "train" in texts["pretrain"] and "train" not in texts["untrained"]
    for counts in texts.values():
        kinds = [count for name, count in counts.items() if name.startswith("validation/")]
        assert len(kinds) > 4 and sum(kinds) == counts["validation"]
    assert {line["metric"] for line in lines} == {"bpb"}, "by default a base model answers no questions"
    base = evaluate(out, "--questions", "5", "--stage", "pretrain", "--tasks", "tinyworld", str(CAPITALS))
    own = [line for line in base if line["metric"] != "bpb"]
    names = [*(f"tinyworld/{kind}" for kind in QUESTION_KINDS), "capitals/named", "capitals/chosen"]
    assert [(line["stage"], line["task"]) for line in own] == [("pretrain", name) for name in names]
    assert [(line["count"], line["chance"], line["skipped"]) for line in own[-2:]] == [(5, 0.0, 0), (5, 0.25, 0)]
    assert "  capitals/chosen              accuracy 0." in capsys.readouterr().out
    assert main.main(["report", "--out", str(out)]) == 0
    assert "capitals/chosen" in (out / "runs/first/report.md").read_text("utf-8")


def test_a_default_task_suits_the_data() -> None:
    task = load_task("tinyworld")
    own = {"data": "texts/", "conversations": "talk.jsonl"}
    stages = {"untrained", "pretrain", *CHAT_STAGES}
    for changes, suited in (({}, stages), ({"data": "texts/"}, {*CHAT_STAGES}), (own, set())):
        recipe = Resolved.of(llama_recipe(), **changes)
        assert {stage for stage in stages if task.suits(recipe, stage)} == suited


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("riddles", "there is no task 'riddles': use tinyworld, or the path of a .py file"),
        ("{}/broken.py", "broken.py, line 2: ZeroDivisionError"),
        ("{}/empty.py", "does not end in TASK = … \\(a quern.eval.task.Task\\)"),
    ],
)
def test_a_task_that_cannot_be_read_is_named(tmp_path: Path, tasks: str, message: str) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nx / 0\n", encoding="utf-8")
    (tmp_path / "empty.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_task(tasks.format(tmp_path))


def test_core_is_asked_from_a_folder_of_files(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["evaluate", "--out", str(out), *PLAIN, "--limit", "3"]) == 1
    assert "--bundle and --limit are for CORE: add --tasks core" in capsys.readouterr().err
    rows = [{"query": f"{n} and", "choices": ["one", "two"], "gold": n % 2} for n in range(9)]
    (out / "copa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ("--tasks", "core", "--limit", "7")
    lines = evaluate(out, *flags, "--bundle", str(out))
    asked = [(line["stage"], line["task"], line["count"]) for line in lines if "copa" in line["task"]]
    assert asked == [("pretrain", "core/copa", 7)], "the untrained model is not asked"
    assert lines[-1]["task"] == "mean of 1 of CORE's 22 tasks, v2, 7 questions each"
    (out / "downloads/core/eval_data").mkdir(parents=True)
    (out / "copa.jsonl").rename(out / "downloads/core/eval_data/copa.jsonl")
    for bundle in ((), ("--bundle", "core")):
        assert evaluate(out, *flags, *bundle, "--stage", "pretrain")[-1]["count"] == 7
    answers = out / "runs/first/answers/pretrain/core/copa.answers.jsonl"
    assert len(answers.read_text("utf-8").splitlines()) == 8
    assert main.main(["report", "--out", str(out)]) == 0
    report = (out / "runs/first/report.md").read_text("utf-8")
    assert "core/copa" in report and "centred accuracy" in report


def test_questions_that_do_not_fit_are_counted_and_the_others_scored() -> None:
    tokenizer = tiny_tokenizer()
    lengths = {
        kind: [len(render_prompt(tokenizer, q.messages)) for q in questions(0, kind, COUNT)] for kind in QUESTION_KINDS
    }
    context = sorted(lengths["facts"])[COUNT // 2]
    engine = Engine(tiny_model(tokenizer.vocab_size, context), tokenizer, CPU)
    graded = run_task(engine, TASK, count=COUNT)
    for kind, score in zip(QUESTION_KINDS, graded.scores, strict=True):
        fitting = sum(length + 1 <= context for length in lengths[kind])
        assert (score.task, score.count, score.skipped) == (f"tinyworld/{kind}", fitting, COUNT - fitting)
        assert (score.value is None) == (fitting == 0)
        assert sum(reply.item.kind == kind for reply in graded.replies) == fitting
        left = f"; asked {fitting} of {COUNT} questions, the others do not fit a context of {context} tokens"
        assert (left in score.described(context)) == (0 < fitting < COUNT)
    counts = {score.count for score in graded.scores}
    assert 0 in counts and len(counts) > 2  # some fit, none, all but a few


def test_a_run_whose_context_holds_no_question_is_evaluated_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, llama_recipe(context=4))
    lines = evaluate(tmp_path, "--questions", "2", "--stage", "pretrain")
    shown = capsys.readouterr().out
    assert "tinyworld/sums               not measured: none of its 2 questions fits a context of 4 tokens" in shown
    (sums,) = [line for line in lines if line["task"] == "tinyworld/sums"]
    assert (sums["value"], sums["count"], sums["skipped"]) == (None, 0, 2)
    assert [line["value"] > 0 for line in lines if line["task"] == "validation"] == [True]
    assert main.main(["report", "--out", str(tmp_path)]) == 0
