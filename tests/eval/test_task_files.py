"""Task files through the real evaluate stage, with a small random model."""

import json
from pathlib import Path

import pytest

from quern.cli import main
from quern.eval.task import CHAT_STAGES
from quern.eval.tasks import load_task
from tests.support.llama_run import llama_recipe, write_run

CAPITALS = Path(__file__).parents[2] / "experiments" / "task_capitals.py"
PLAIN = "--no-compile --dtype fp32 --threads 1 --device cpu".split()


def evaluate(out: Path, *flags: str) -> list[dict]:
    """The lines that a call adds to evaluate.jsonl."""
    path = out / "runs/first/evaluate.jsonl"
    before = len(path.read_text("utf-8").splitlines()) if path.exists() else 0
    assert main.main(["evaluate", "--out", str(out), *PLAIN, *flags]) == 0
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()[before:]]


def answered(lines: list[dict]) -> list[dict]:
    """The scores of questions, without bits per byte."""
    return [line for line in lines if line["metric"] != "bpb"]


def test_a_task_file_scores_the_base_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, llama_recipe(context=128))
    lines = evaluate(tmp_path, "--stage", "pretrain", "--questions", "5", "--tasks", str(CAPITALS))
    assert [(line["stage"], line["task"]) for line in answered(lines)] == [
        ("pretrain", "capitals/named"),
        ("pretrain", "capitals/chosen"),
    ]
    assert [(line["count"], line["chance"], line["skipped"]) for line in answered(lines)] == [(5, 0.0, 0), (5, 0.25, 0)]
    assert "  capitals/chosen              accuracy 0." in capsys.readouterr().out
    assert main.main(["report", "--out", str(tmp_path)]) == 0
    assert "capitals/chosen" in (tmp_path / "runs/first/report.md").read_text("utf-8")


def test_several_tasks_of_every_model(tmp_path: Path) -> None:
    write_run(tmp_path, llama_recipe(context=128))
    lines = evaluate(tmp_path, "--questions", "2", "--tasks", "tinyworld", str(CAPITALS))
    kinds = ["facts", "sums", "word_problems", "spelling", "counting", "choice"]
    named = [*(f"tinyworld/{kind}" for kind in kinds), "capitals/named", "capitals/chosen"]
    assert [(line["stage"], line["task"]) for line in answered(lines)] == [
        (s, t) for s in ("untrained", "pretrain") for t in named
    ]
    hashes = {
        stage: [line["prompt_hash"] for line in answered(lines) if line["stage"] == stage]
        for stage in ("untrained", "pretrain")
    }
    assert not set(hashes["untrained"]) & set(hashes["pretrain"]) - {None}  # a chat prompt is not a base prompt


def test_by_default_the_base_model_answers_no_questions(tmp_path: Path) -> None:
    write_run(tmp_path, llama_recipe(context=128))
    lines = evaluate(tmp_path, "--questions", "1")
    assert {line["metric"] for line in lines if line["stage"] == "pretrain"} == {"bpb"}
    assert sum(line["task"].startswith("tinyworld/") for line in lines) == 6
    only = evaluate(tmp_path, "--questions", "1", "--stage", "pretrain")
    assert {line["stage"] for line in only} == {"pretrain"} and len(answered(only)) == 6


def test_a_default_task_suits_the_data() -> None:
    task = load_task("tinyworld")
    own = {"data": "texts/", "conversations": "talk.jsonl"}
    stages = {"untrained", "pretrain", *CHAT_STAGES}
    for changes, suited in (({}, stages), ({"data": "texts/"}, {*CHAT_STAGES}), (own, set())):
        recipe = llama_recipe().__class__(**{**vars(llama_recipe()), **changes})
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


def test_core_is_asked_from_a_folder_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, llama_recipe(context=128))
    assert main.main(["evaluate", "--out", str(tmp_path), *PLAIN, "--limit", "3"]) == 1
    assert "--bundle and --limit are for CORE: add --tasks core" in capsys.readouterr().err
    rows = [{"query": f"{n} and", "choices": ["one", "two"], "gold": n % 2} for n in range(9)]
    (tmp_path / "copa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines = evaluate(tmp_path, "--tasks", "core", "--bundle", str(tmp_path), "--limit", "7")
    assert [(line["stage"], line["task"], line["count"]) for line in lines if "copa" in line["task"]] == [
        ("pretrain", "core/copa", 7)
    ]
    assert [line["task"] for line in lines][-1] == "mean of 1 of CORE's 22 tasks, v2, 7 questions each"
    (tmp_path / "downloads/core/eval_data").mkdir(parents=True)
    (tmp_path / "copa.jsonl").rename(tmp_path / "downloads/core/eval_data/copa.jsonl")
    for bundle in ((), ("--bundle", "core")):
        assert evaluate(tmp_path, "--tasks", "core", *bundle, "--limit", "7")[-1]["count"] == 7
    answers = tmp_path / "runs/first/core/pretrain/copa.answers.jsonl"
    assert len(answers.read_text("utf-8").splitlines()) == 8
    assert main.main(["report", "--out", str(tmp_path)]) == 0
    report = (tmp_path / "runs/first/report.md").read_text("utf-8")
    assert "core/copa" in report and "centred accuracy" in report
