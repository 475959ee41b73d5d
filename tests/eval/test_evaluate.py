"""`quern evaluate` on small random models: tasks, texts and CORE; damaged files, changed runs, wrong flags."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.cli import main
from quern.eval.answers import kept_score, read_answers
from quern.eval.run_task import run_task
from quern.eval.task import CHAT_STAGES, TINYWORLD, knows_world, world_items
from quern.generate.engine import Engine
from quern.mesh import Mesh, ProcessGroup, alone
from quern.recipe import Resolved
from quern.records import read_lines
from quern.runs.run_dir import RunDir
from quern.stages.evaluate import Questions, refuse_unequal
from quern.text.chat import render_prompt
from quern.text.tinyworld.corpus import QUESTION_KINDS
from quern.train import checkpoint, manifest
from tests.support.exported import random_state, toy_recipe, write_run
from tests.support.rows import write_rows
from tests.support.small_text import write_text
from tests.support.tiny_model import CPU, tiny_model, tiny_tokenizer

CAPITALS = Path(__file__).parents[2] / "experiments" / "task_capitals.py"
PLAIN = "--no-compile --dtype fp32 --threads 1 --device cpu".split()
SAME = """
from quern.eval.task import Task, question
TASK = Task("same", lambda seed, count: [question("one?", "two")])
"""
Lines = list[dict[str, Any]]


def evaluate(out: Path, *flags: str) -> Lines:
    """The lines that a call adds to evaluate.jsonl."""
    path = out / "runs/first/evaluate.jsonl"
    before = len(read_lines(path))
    assert main.main(["evaluate", "--out", str(out), *PLAIN, *flags]) == 0
    return read_lines(path)[before:]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a call ends."""
    assert main.main([*arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def core(out: Path, *flags: str) -> Lines:
    return evaluate(out, "--stage", "pretrain", "--tasks", "core", "--bundle", str(out), *flags)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with a run on the built-in world."""
    out = tmp_path_factory.mktemp("world")
    write_run(out, toy_recipe("llama", context=128))
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with a run on another text, and its answers to a task of CORE."""
    out = tmp_path_factory.mktemp("out")
    write_text(out)
    write_run(out, replace(toy_recipe("llama", context=128), data=str(out / "text.jsonl")))
    rows = [{"query": f"{n} and", "choices": ["one", "two"], "gold": n % 2} for n in range(9)]
    write_rows(out / "copa.jsonl", rows)
    core(out)
    return out


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "out")


def answers(out: Path, run: str = "first", task: str = "core/copa") -> Path:
    return out / f"runs/{run}/answers/pretrain/{task}.answers.jsonl"


def test_texts_and_questions_of_every_model(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = evaluate(world, "--questions", "1")
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
    base = evaluate(world, "--questions", "2", "--stage", "pretrain", "--tasks", "tinyworld", str(CAPITALS))
    own = [line for line in base if line["metric"] != "bpb"]
    names = [*(f"tinyworld/{kind}" for kind in QUESTION_KINDS), "capitals/named", "capitals/chosen"]
    assert [(line["stage"], line["task"]) for line in own] == [("pretrain", name) for name in names]
    assert [(line["count"], line["chance"], line["skipped"]) for line in own[-2:]] == [(2, 0.0, 0), (2, 0.25, 0)]
    assert "  capitals/chosen              accuracy " in capsys.readouterr().out
    assert main.main(["report", "--out", str(world)]) == 0
    assert "capitals/chosen" in (world / "runs/first/report.md").read_text("utf-8")


def test_what_is_written_for_the_report_is_named_while_it_takes_long(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quern.process.SILENT_SECONDS", 0.0)
    evaluate(out, "--stage", "pretrain")
    said = capsys.readouterr().out.partition("evaluating: pretrain\n")[2]
    assert "waiting for the model, which writes samples for the report\n" in said


def test_core_is_asked_from_a_folder_of_files(out: Path) -> None:
    flags = ("--tasks", "core", "--limit", "7")
    lines = evaluate(out, *flags, "--bundle", str(out))
    asked = [(line["stage"], line["task"], line["count"]) for line in lines if "copa" in line["task"]]
    assert asked == [("pretrain", "core/copa", 7)], "the untrained model is not asked"
    assert lines[-1]["task"] == "mean of 1 of CORE's 22 tasks, v2, 7 questions each"
    (out / "downloads/core/eval_data").mkdir(parents=True)
    (out / "copa.jsonl").rename(out / "downloads/core/eval_data/copa.jsonl")
    for bundle in ((), ("--bundle", "core")):
        assert evaluate(out, *flags, *bundle, "--stage", "pretrain")[-1]["count"] == 7
    assert len(read_lines(answers(out))) == 8
    assert main.main(["report", "--out", str(out)]) == 0
    report = (out / "runs/first/report.md").read_text("utf-8")
    assert "core/copa" in report and "centred accuracy" in report


# Tasks ------------------------------------------------------------------------------------------------------


def test_a_default_task_suits_the_data() -> None:
    own = {"data": "texts/", "conversations": "talk.jsonl"}
    stages = {"untrained", "pretrain", *CHAT_STAGES}
    for changes, suited in (({}, stages), ({"data": "texts/"}, {*CHAT_STAGES}), (own, set())):
        recipe = Resolved.of(toy_recipe("llama"), **changes)
        assert {stage for stage in stages if knows_world(recipe, stage)} == suited


def test_questions_that_do_not_fit_are_counted_and_the_others_scored() -> None:
    tokenizer, count = tiny_tokenizer(), 6
    lengths = {
        kind: [len(render_prompt(tokenizer, item.messages)) for item in world_items(0, count, [kind])]
        for kind in QUESTION_KINDS
    }
    context = sorted(lengths["facts"])[count // 2]
    engine = Engine(tiny_model(tokenizer.vocab_size, context), tokenizer, CPU)
    scores, replies = run_task(engine, TINYWORLD, count=count)
    for kind, score in zip(QUESTION_KINDS, scores, strict=True):
        fitting = sum(length + 1 <= context for length in lengths[kind])
        assert (score.task, score.count, score.skipped) == (f"tinyworld/{kind}", fitting, count - fitting)
        assert (score.value is None) == (fitting == 0)
        assert sum(reply.item.kind == kind for reply in replies) == fitting
        left = f"; asked {fitting} of {count} questions, the others do not fit a context of {context} tokens"
        assert (left in score.described(context)) == (0 < fitting < count)
        none = f"not measured: none of its {count} questions fits a context of {context} tokens"
        assert (score.described(context) == none) == (fitting == 0)
    counts = {score.count for score in scores}
    assert 0 in counts and len(counts) > 2  # some fit, none, all but a few


def test_a_run_whose_context_holds_no_question_is_evaluated_all_the_same(tmp_path: Path) -> None:
    write_text(tmp_path)
    write_run(tmp_path, replace(toy_recipe("llama", context=4), data=str(tmp_path / "text.jsonl")))
    lines = evaluate(tmp_path, "--questions", "2", "--stage", "pretrain", "--tasks", "tinyworld")
    (sums,) = [line for line in lines if line["task"] == "tinyworld/sums"]
    assert (sums["value"], sums["count"], sums["skipped"]) == (None, 0, 2)
    assert [line["value"] > 0 for line in lines if line["task"] == "validation"] == [True]
    assert main.main(["report", "--out", str(tmp_path)]) == 0


# Answers on disk --------------------------------------------------------------------------------------------


def test_damaged_answers_are_asked_again_and_whole_ones_are_kept(out: Path) -> None:
    path = answers(out)
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    settings = {name: value for name, value in json.loads(lines[0]).items() if name != "score"}
    kept = kept_score(path, settings)
    assert kept is not None and kept.count == 9 and kept_score(path, settings | {"context": 7}) is None
    for damaged in ("", "".join(lines[:-1]), "[]\n", whole.replace('"score"', '"scor"'), whole[: len(whole) // 2]):
        path.write_text(damaged, encoding="utf-8")
        assert kept_score(path, settings) is None
    core(out)
    assert path.read_text("utf-8").splitlines()[1:] == whole.splitlines()[1:]
    before = os.stat(path).st_mtime_ns
    core(out)
    assert os.stat(path).st_mtime_ns == before


def test_answers_of_the_weights_before_are_not_those_of_the_run(out: Path) -> None:
    """Trained again under the same name, for as many steps."""
    run_dir, before = RunDir(out, "first"), read_lines(answers(out))
    (file,) = manifest.steps(run_dir.checkpoints("pretrain"))
    shutil.rmtree(run_dir.checkpoints("pretrain"))
    recipe = replace(toy_recipe("llama", context=128), data=str(out / "text.jsonl"))
    state, tokenizer = random_state(recipe), run_dir.tokenizer().fingerprint
    tensors = {name: 0.5 * tensor for name, tensor in state.tensors().items()}
    meta = {"recipe": recipe.to_json(), "tokenizer": tokenizer, "seed": 0, "state": state.meta()}
    checkpoint.save(run_dir.checkpoints("pretrain"), file, tensors, meta, keep=1)
    core(out)
    assert read_lines(answers(out))[1:] != before[1:]


def test_a_line_that_a_kill_has_torn_does_not_take_the_next_one_with_it(out: Path) -> None:
    path = out / "runs/first/evaluate.jsonl"
    lines = read_lines(path)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"stage": "pretrain", "ta')
    assert core(out) == lines and read_lines(path) == lines * 2
    (copa,) = [line for line in core(out, "--limit", "1000") if line["task"] == "core/copa"]
    assert copa["count"] == 9, "more questions than there are are all of them"


def test_what_does_not_fit_is_refused_in_one_line(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a", SAME), ("b", SAME), ("none", SAME.replace('[question("one?", "two")]', "[]"))):
        (out / f"{name}.py").write_text(text, encoding="utf-8")
    a, b, none = (str(out / f"{name}.py") for name in ("a", "b", "none"))
    plain = ["evaluate", "--out", str(out), *PLAIN]
    base = [*plain, "--stage", "pretrain"]
    chat = "--chat-data and --samples are for the chat tasks: add --tasks chat"
    wrong: Sequence[tuple[list[str], str]] = (
        ([*plain, "--stage", "rl", "--tasks", "core"], "run 'first' has no stage 'rl' yet: `quern rl --run first"),
        (
            [*plain, "--limit", "3"],
            "--limit is for --tasks core or chat and for --harness: for other tasks, give --questions",
        ),
        ([*plain, "--chat-data", str(out)], chat),
        ([*base, "--tasks", a, b], "two tasks have the name 'same': "),
        ([*base, "--tasks", none], "same: no questions to score; ask for at least one"),
        ([*base, "--tasks", "chat/counting", "--samples", "3"], "--samples is for HumanEval: add --tasks chat/human"),
        ([*base, "--tasks", "core", "--bundle", str(out / "none")], "--bundle /"),
        ([*base, "--tasks", "chat", "--chat-data", "none"], "--chat-data none: there is no such file or folder"),
        ([*base, "--tasks", "core/x"], "CORE has no task 'x': use hellaswag_zeroshot"),
    )
    for arguments, message in wrong:
        assert message in refused(capsys, *arguments)
    assert not (out / "downloads").exists()
    group = ProcessGroup("world", 2, 0)
    with pytest.raises(ValueError, match="--harness runs in one process: leave --ranks out"):
        Questions(questions=1, harness=["copa"]).find(out, Mesh(2, 1, 0, group, alone().model, group), print)


# Two runs compared ------------------------------------------------------------------------------------------


def test_the_command_compares_runs_and_stages(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(out, "--stage", "pretrain", "--tasks", str(CAPITALS), "--questions", "4")
    shutil.copytree(out / "runs/first", out / "runs/second")
    path = answers(out, "second", "capitals/chosen")
    first, *lines = read_lines(path)
    assert first["task"] == "capitals/chosen" and len(lines) == 4
    turned = [{**line, "score": 1 - line["score"]} for line in lines[::-1]]
    write_rows(path, [first, *turned])
    runs = ["runs", "--out", str(out), "compare"]
    capsys.readouterr()
    assert main.main([*runs, "first", "second"]) == 0
    table = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    by_task = {record["task"]: record for record in read_lines(out / "runs/first/comparisons.jsonl")}
    assert table >= by_task.keys() == {"core/copa", "capitals/named", "capitals/chosen"}
    chosen, copa = by_task["capitals/chosen"], by_task["core/copa"]
    assert chosen["only_first"] + chosen["only_second"] == 4 == chosen["count"]
    assert copa["count"] == 9 and copa["p"] == 1.0 and copa["only_first"] == copa["only_second"] == 0
    fewer = answers(out, "second").read_text("utf-8").splitlines(keepends=True)[:-1]  # as with another --limit
    answers(out, "second").write_text("".join(fewer), "utf-8")
    assert main.main([*runs, "first", "second"]) == 0
    printed = capsys.readouterr().out
    assert (
        "not compared: core/copa: 1 items only of first/pretrain: evaluate" in printed and "capitals/named" in printed
    )
    answers(out, "second").unlink()
    assert main.main([*runs, "first", "second/pretrain"]) == 0
    assert "not compared: core/copa" in capsys.readouterr().out
    assert main.main([*runs, "first", "second/sft"]) == 0
    assert "answers: run 'second' has no stage 'sft' yet: `quern sft --run second" in capsys.readouterr().out
    shutil.rmtree(answers(out, "first", "capitals/chosen").parent)
    assert "the runs share no task: evaluate both with the same --tasks" in refused(capsys, *runs, "first", "second")
    assert "there is no run 'none'" in refused(capsys, *runs, "none", "first")
    same = "first and first are the same model: name another run, or RUN/STAGE"
    assert same in refused(capsys, *runs, "first", "first")


def test_runs_of_other_data_or_damaged_answers_are_not_compared(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(out / "runs/first", out / "runs/second")
    rows = (out / "copa.jsonl").read_text(encoding="utf-8").replace("one", "six")
    (out / "copa.jsonl").write_text(rows, encoding="utf-8")
    evaluate(out, "--tasks", "core", "--bundle", str(out), "--run", "second")
    told = refused(capsys, "runs", "--out", str(out), "compare", "first", "second")
    assert "core/copa: 9 items only of first/pretrain and 9 items only of second/pretrain" in told
    path = answers(out)
    whole = path.read_bytes()
    changed = (b"", b"\xff\xfe\n" + whole, whole.replace(b"{", b"[", 1), whole.replace(b'"prompt"', b'"promt"', 1))
    for damaged in changed:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"copa.answers.jsonl is damaged .*: remove it and evaluate again"):
            read_answers(path.parent)


# The extra and the ranks ------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="the ranks loaded different checkpoints of sft: evaluate when"):
        refuse_unequal(model | {"step": 4}, Gathered("world", 2, 1))
