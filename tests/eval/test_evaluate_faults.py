"""What `quern evaluate` makes of damaged files, killed evaluations, runs that changed, and flags that do not fit."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quern.cli import main
from quern.eval.answers import read_answers
from quern.mesh import Mesh, ProcessGroup, alone
from quern.runs.run_dir import RunDir
from quern.stages.evaluate import Questions, refuse_unequal
from quern.train import checkpoint, manifest
from tests.support.llama_run import llama_recipe, random_state, write_run
from tests.support.small_text import write_text

PLAIN = "--no-compile --dtype fp32 --threads 1 --device cpu --stage pretrain".split()
TASK = """
from quern.eval.task import Task, question
TASK = Task("same", lambda seed, count: [question("one?", "two")])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with a run, and its answers to a task of CORE."""
    out = tmp_path_factory.mktemp("out")
    write_text(out)
    write_run(out, replace(llama_recipe(context=64), data=str(out / "text.jsonl")))
    rows = [{"query": f"{n} and", "choices": ["one", "two"], "gold": n % 2} for n in range(9)]
    (out / "copa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main.main(core(out)) == 0
    return out


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "out")


def core(out: Path, *flags: str) -> list[str]:
    return ["evaluate", "--out", str(out), *PLAIN, "--tasks", "core", "--bundle", str(out), *flags]


def answers(out: Path) -> Path:
    return out / "runs/first/answers/pretrain/core/copa.answers.jsonl"


def cut(text: str) -> str:
    return text[: len(text) // 2]


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": cut,
    "an item is gone": lambda text: "".join(text.splitlines(keepends=True)[:-1]),
    "other JSON": lambda text: "[]\n",
    "an item without its verdict": lambda text: text.replace('"score"', '"scor"'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_of_answers_is_written_again(out: Path, damage: Callable[[str], str]) -> None:
    path = answers(out)
    whole = path.read_text(encoding="utf-8")
    path.write_text(damage(whole), encoding="utf-8")
    assert main.main(core(out)) == 0
    assert path.read_text("utf-8").splitlines()[1:] == whole.splitlines()[1:]
    before = os.stat(path).st_mtime_ns
    assert main.main(core(out)) == 0 and os.stat(path).st_mtime_ns == before


def test_answers_of_the_weights_before_are_not_those_of_the_run(out: Path) -> None:
    """Trained again under the same name, for as many steps."""
    run_dir, path = RunDir(out, "first"), answers(out)
    before = path.read_text(encoding="utf-8")
    (file,) = manifest.steps(run_dir.checkpoints("pretrain"))
    shutil.rmtree(run_dir.checkpoints("pretrain"))
    state = random_state(replace(llama_recipe(context=64), data=str(out / "text.jsonl")))
    tokenizer = run_dir.tokenizer().fingerprint
    recipe = replace(llama_recipe(context=64), data=str(out / "text.jsonl")).to_json()
    tensors = {name: 0.5 * tensor for name, tensor in state.tensors().items()}
    meta = {"recipe": recipe, "tokenizer": tokenizer, "seed": 0, "state": state.meta()}
    checkpoint.save(run_dir.checkpoints("pretrain"), file, tensors, meta, keep=1)
    assert main.main(core(out)) == 0
    assert path.read_text(encoding="utf-8").splitlines()[1:] != before.splitlines()[1:]


def test_a_line_that_a_kill_has_torn_does_not_take_the_next_one_with_it(out: Path) -> None:
    path = out / "runs/first/evaluate.jsonl"
    count = len(path.read_text("utf-8").splitlines())
    with path.open("a", encoding="utf-8") as file:
        file.write('{"stage": "pretrain", "ta')
    assert main.main(core(out)) == 0
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len(lines) == 2 * count and lines[:count] == lines[count:]


def test_more_questions_than_there_are_are_all_of_them(out: Path) -> None:
    assert main.main(core(out, "--limit", "1000")) == 0
    lines = [json.loads(line) for line in (out / "runs/first/evaluate.jsonl").read_text("utf-8").splitlines()]
    counts = [line["count"] for line in lines if line["task"] == "core/copa"]
    assert counts == [9, 9]


def test_what_does_not_fit_is_refused_in_one_line(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (out / f"{name}.py").write_text(TASK, encoding="utf-8")
    plain = ["evaluate", "--out", str(out), *PLAIN]
    for arguments, message in (
        ([*plain[:-2], "--stage", "rl", "--tasks", "core"], "run 'first' has no stage 'rl' yet: `quern rl --run first"),
        ([*plain, "--tasks", str(out / "a.py"), str(out / "b.py")], "two tasks have the name 'same': "),
        ([*plain, "--tasks", "chat/counting", "--samples", "3"], "--samples is for HumanEval: add --tasks chat/human"),
        ([*plain, "--tasks", "core", "--bundle", str(out / "none")], "there is no file or folder"),
        ([*plain, "--run", "none"], "there is no run 'none' under"),
    ):
        assert main.main(arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line, line
    assert not (out / "downloads").exists()
    group = ProcessGroup("world", 2, 0)
    with pytest.raises(ValueError, match="--harness runs in one process: leave --ranks out"):
        Questions(questions=1, harness=["copa"]).find(out, Mesh(2, 1, 0, group, alone().model, group, group), print)


def test_a_task_without_questions_is_named(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / "none.py").write_text(TASK.replace('[question("one?", "two")]', "[]"), encoding="utf-8")
    assert main.main(["evaluate", "--out", str(out), *PLAIN, "--tasks", str(out / "none.py")]) == 1
    assert "same: no questions to score; ask for at least one" in capsys.readouterr().err


def test_damaged_answers_are_named_where_runs_are_compared(out: Path) -> None:
    path = answers(out)
    whole = path.read_bytes()
    for damaged in (
        b"",
        b"\xff\xfe\n" + whole,
        whole.replace(b"{", b"[", 1),
        whole.replace(b'"prompt"', b'"promt"', 1),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"copa.answers.jsonl is damaged .*: remove it and evaluate again"):
            read_answers(path.parent)


def test_runs_on_other_data_are_not_compared(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(out / "runs/first", out / "runs/second")
    rows = (out / "copa.jsonl").read_text(encoding="utf-8").replace("one", "six")
    (out / "copa.jsonl").write_text(rows, encoding="utf-8")
    assert main.main(core(out, "--run", "second")) == 0
    assert main.main(["runs", "--out", str(out), "compare", "first", "second"]) == 1
    assert "core/copa: 9 items only of first/pretrain and 9 items only of second/pretrain" in capsys.readouterr().err


def test_without_lm_eval_the_message_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "quern.eval.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"lm-evaluation-harness needs extra .*pip install -e '\.\[eval\]'$"):
        Questions(questions=1, harness=["arc_easy"]).find(tmp_path, alone(), print)


class Gathered(ProcessGroup):
    """A group whose other rank has loaded another step."""

    def gather_objects(self, value: dict) -> list[dict]:
        return [value | {"step": 3}, value]


def test_ranks_with_different_models_are_refused() -> None:
    model = {"stage": "sft", "step": 3}
    refuse_unequal(model, Gathered("world", 2, 1))
    refuse_unequal(model | {"step": 4}, alone().world)
    with pytest.raises(ValueError, match="the ranks loaded different checkpoints of stage sft: evaluate again when"):
        refuse_unequal(model | {"step": 4}, Gathered("world", 2, 1))
