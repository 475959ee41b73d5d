"""Chat tasks: their files in all forms, programs and checks, a model that knows nothing and one that knows all."""

import math
import types
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.eval import chat
from quern.eval.answers import item_hash
from quern.eval.run_task import Records
from quern.eval.score import Score
from quern.eval.task import Item, passage, question
from quern.generate.engine import Engine
from quern.generate.sandbox import Program
from quern.mixture.sources import to_messages
from quern.model.gpt import GPT
from quern.records import read_lines
from quern.rl.environment import draw_item, is_right_number, last_number, load_environment
from quern.text.chat import Message, render
from quern.text.tokenizer import Tokenizer
from tests.eval.test_evaluate import evaluate
from tests.generate.sandbox.test_sandbox import opened
from tests.support.exported import toy_recipe, write_run
from tests.support.rows import write_rows
from tests.support.tiny_model import CPU, tiny_model

ARC = {"question": "Which grows?", "choices": {"text": ["rye", "tin"], "label": ["1", "2"]}, "answerKey": "2"}
MMLU = {"question": "Which grows?", "choices": ["rye", "tin", "oak"], "answer": 1}
CORE = {"query": "Question: Which grows?", "choices": ["rye", "tin"], "gold": 1}
GSM8K = {"question": "Ann has 3 eggs and lays 4. How many?", "answer": "She has 3+4=<<3+4=7>>7 eggs.\n#### 7"}
EASY = {"question": "Bo has 2. How many?", "answer": "#### 2"}
CODE = {
    "task_id": "HumanEval/0",
    "prompt": 'BASE = 2\n\n\ndef twice(n: int) -> int:\n    """Twice n."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return BASE * n\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}


def outcomes(passes: Sequence[bool]) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(passed=one) for one in passes]


def trusting(programs: Sequence[Program]) -> list[types.SimpleNamespace]:
    """The outcomes of the programs of this file, which need no sandbox."""
    passes = list[bool]()
    for program in programs:
        names: dict[str, Any] = {}
        try:
            exec(program.source, names)
            exec(program.check, {"program": types.SimpleNamespace(**names)})
            passes.append(True)
        except Exception:
            passes.append(False)
    return outcomes(passes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of all tasks: two questions each, in the layouts in which they are published."""
    data = tmp_path / "data"
    write_rows(data / "core/arc_easy.jsonl.gz", [CORE, {**CORE, "query": "Question: Which flies?", "gold": 0}])
    write_rows(data / "ARC-Challenge/test-00000-of-00001.parquet", [ARC, {**ARC, "question": "Which sinks?"}])
    write_rows(data / "ARC-Challenge/train-00000-of-00001.parquet", [ARC])
    write_rows(data / "mmlu/all/test-00000-of-00001.parquet", [MMLU, {**MMLU, "question": "Which rusts?", "answer": 2}])
    write_rows(data / "gsm8k/test.jsonl", [GSM8K, EASY])
    write_rows(data / "gsm8k/train.jsonl", [GSM8K])
    write_rows(data / "HumanEval.jsonl", [CODE])
    return data


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of this file run without a sandbox, which may not work on this machine."""
    monkeypatch.setattr("quern.eval.chat.open_sandbox", lambda workers: types.SimpleNamespace(run=trusting))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["The miller has 3 eggs + 4 eggs. def twice(n): return BASE * n"] * 4, 300)


def asked_of(folder: Path, *names: str, limit: int | None = None) -> list[chat.Asked]:
    return chat.find_chat_tasks(folder, folder, names, limit, lambda line: None)


@pytest.mark.parametrize("row", [ARC, MMLU, CORE, {**MMLU, "answer": "B"}])
@pytest.mark.parametrize("name", ["arc_easy.jsonl.gz", "ARC-Easy/test-00000-of-00001.parquet"])
def test_multiple_choice_in_every_form(tmp_path: Path, row: dict[str, Any], name: str) -> None:
    write_rows(tmp_path / name, [row])
    ((item,),) = [one.items for one in asked_of(tmp_path, "arc_easy")]
    assert item.question.startswith("Which grows?\nA) rye\nB) tin") and item.answer == "B"
    assert item.choices == tuple("ABC"[: item.question.count(")")])
    assert passage(item).split() == ["Which", "grows?", "tin"]


def test_files_are_found_and_missing_ones_are_named(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert [one.task for one in chat.find_chat_tasks(folder, tmp_path, [], 2, said.append)][:4] == list(chat.TASKS[:4])
    (folder / "mmlu/all/test-00000-of-00001.parquet").unlink()
    assert "mmlu" not in {one.task.name for one in chat.find_chat_tasks(folder, tmp_path, [], None, said.append)}
    assert any(line.startswith("not asked: chat/mmlu") for line in said)
    with pytest.raises(ValueError, match="has no file for mmlu: give its folder"):
        asked_of(folder, "mmlu")
    with pytest.raises(ValueError, match="chat has no task 'x': use arc_easy, arc_challenge"):
        asked_of(folder, "x")
    assert [one.task.name for one in chat.find_chat_tasks(None, tmp_path, ["counting"], 3, said.append)] == ["counting"]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mmlu", {**MMLU, "answer": 3}, "the answer 3 is none of its 3 options"),
        ("mmlu", {**MMLU, "choices": "ab"}, "an option is no text, or empty"),
        ("mmlu", {"question": "q", "answer": 1}, "the key 'choices' is missing"),
        ("mmlu", [1], "it is no object"),
        ("arc_easy", {**ARC, "answerKey": "C"}, "answerKey 'C' is none of its labels, 1, 2"),
        ("gsm8k", {"question": "q", "answer": "#### seven"}, "no number after ####"),
        ("gsm8k", {"question": "q", "answer": "12"}, "no number after ####"),
        ("gsm8k", {"question": None, "answer": "#### 7"}, "the question is no text, or empty"),
        ("gsm8k", {"question": "q"}, "the key 'answer' is missing"),
        ("humaneval", {**CODE, "entry_point": "a b"}, "its entry_point no name"),
        ("humaneval", {"prompt": "def f():"}, "the key 'canonical_solution' is missing"),
    ],
)
def test_a_damaged_row_is_named_with_its_line(tmp_path: Path, name: str, row: Any, message: str) -> None:
    good = {"mmlu": MMLU, "arc_easy": ARC, "gsm8k": GSM8K, "humaneval": CODE}[name]
    path = write_rows(tmp_path / f"{name}.jsonl", [good, row])
    with pytest.raises(ValueError, match=f"{name}.jsonl, line 2: no row of {name}: .*{message}"):
        chat.read_items(path, name)


def test_files_cut_short_or_empty_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mmlu.jsonl.gz", [MMLU] * 500)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(OSError, match=r"cannot read .*mmlu.jsonl.gz, it may be cut short"):
        chat.read_items(path, "mmlu")
    with pytest.raises(ValueError, match="has no rows of gsm8k"):
        chat.read_items(write_rows(tmp_path / "gsm8k.jsonl", []), "gsm8k")
    with pytest.raises(ValueError, match="no row of gsm8k: the key .answer. is missing"):
        chat.read_items(write_rows(tmp_path / "gsm8k.parquet", [{"other": 1}]), "gsm8k")


def test_a_limit_takes_the_first_of_one_order(tmp_path: Path) -> None:
    rows = [{**MMLU, "question": f"Which of {n}?"} for n in range(40)]
    write_rows(tmp_path / "mmlu.jsonl", rows)
    (whole,), (some,) = asked_of(tmp_path, "mmlu"), asked_of(tmp_path, "mmlu", limit=7)
    assert some.items == whole.items[:7] and (whole.whole, some.whole) == (True, False)
    assert [item.question.splitlines()[0] for item in whole.items[:3]] != [row["question"] for row in rows[:3]]


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("    return BASE * n\n", True),
        ("    return n\n", False),
        ("Here it is:\n```python\ndef twice(n):\n    return BASE * n\n```\nDone.", True),
        ("```\n    return BASE * n\n```", True),
        ("def twice(n):\n    return n + n", True),
        ("def other(n):\n    return n + n", False),
        ("", False),
    ],
)
def test_a_reply_is_a_body_or_a_whole_function(tmp_path: Path, reply: str, right: bool) -> None:
    (item,) = chat.read_items(write_rows(tmp_path / "humaneval.jsonl", [CODE]), "humaneval")
    program = chat.program_of(item, reply)
    assert trusting([program]) == outcomes([right])
    with opened(1) as sandbox:
        assert [outcome.passed for outcome in sandbox.run([program])] == [right]


def conversation(item: Item) -> list[Message]:
    """An item with a right answer: for GSM8K one that calls the calculator."""
    if item.kind == "gsm8k":
        return to_messages(next(row for row in (GSM8K, EASY) if row["question"] == item.question))
    answer = "-".join(item.answer) if item.kind == "spelling" else item.answer
    return [*item.messages, {"role": "assistant", "content": answer}]


def learn(model: GPT, tokenizer: Tokenizer, conversations: Sequence[list[Message]]) -> None:
    """Trains until the model says every reply by heart."""
    rendered = [render(tokenizer, messages) for messages in conversations]
    width = max(len(ids) for ids, _ in rendered)
    tokens = torch.zeros(len(rendered), width, dtype=torch.long)
    mask = torch.zeros(len(rendered), width, dtype=torch.bool)
    for row, (ids, learned) in enumerate(rendered):
        tokens[row, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        mask[row, : len(ids)] = torch.from_numpy(learned.astype(bool))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        logits = model.logits(model(tokens[:, :-1], model.context(tokens[:, :-1])))
        loss = torch.nn.functional.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
        if loss < 0.02:
            return
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the model did not learn: loss {loss:.3f}")


@pytest.mark.usefixtures("trusted")
def test_a_model_that_knows_all_scores_one_on_every_task(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = [*asked_of(folder, *(task.name for task in chat.PARTS)), *asked_of(folder, "spelling", "counting", limit=2)]
    model = tiny_model(tokenizer.vocab_size, 256)
    model.initialize(0)
    learn(model, tokenizer, [conversation(item) for one in asked for item in one.items])
    engine = Engine(model.eval(), tokenizer, CPU)
    scores = chat.run_chat(engine, asked, Records(tmp_path / "answers", {"step": 3}), base=False, samples=2)
    assert {score.task: score.value for score in scores if score.value != 1.0 and score.metric != "pass@1"} == {}
    assert [score.task for score in scores[-2:]] == ["chat/humaneval", "ChatCORE"]
    assert [score.task for score in scores[:7]] == [f"chat/{task.name}" for task in chat.TASKS]
    assert [score.chance for score in scores[:5]] == [1 / 2, 1 / 2, 1 / 3, 0.0, 0.0]
    lines = read_lines(tmp_path / "answers/chat/gsm8k.answers.jsonl")
    assert lines[0].items() >= {"step": 3, "task": "chat/gsm8k"}.items() and len(lines) == 3
    gsm8k = next(one for one in asked if one.task.name == "gsm8k")
    assert [line["prompt"] for line in lines[1:]] == [item_hash(item) for item in gsm8k.items]
    assert all(line["score"] == 1 for line in lines[1:])
    assert "<<" not in lines[1]["answer"] and (tmp_path / "answers/chat/humaneval.samples.answers.jsonl").is_file()


def test_pass_at_k_is_the_estimate_of_many_samples(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against every way to draw k of n replies: which replies pass is decided here."""
    items = chat.read_items(write_rows(tmp_path / "humaneval.jsonl", [CODE, CODE]), "humaneval")
    task = replace(chat.BY_NAME["humaneval"].task(items), max_tokens=2)
    engine = Engine(tiny_model(tokenizer.vocab_size, 64).eval(), tokenizer, CPU)
    passes = iter([[True] * 3 + [False] * 9, [False] * 12])
    sandbox = types.SimpleNamespace(run=lambda programs: outcomes(next(passes)))
    monkeypatch.setattr("quern.eval.chat.open_sandbox", lambda workers: sandbox)
    scores, right = chat.sampled_scores(engine, task, items, 12, base=True)
    assert right == {0: 3, 1: 0} and [score.metric for score in scores] == ["pass@1", "pass@10"]
    missed = math.comb(9, 10) / math.comb(12, 10)
    assert [score.value for score in scores] == pytest.approx([3 / 12 / 2, (1 - missed) / 2])


def test_only_all_questions_of_all_tasks_are_chatcore() -> None:
    values = {"arc_easy": 0.625, "arc_challenge": 0.25, "mmlu": 0.4, "gsm8k": 0.1, "humaneval": 0.0}
    scores = {name: Score(f"chat/{name}", "accuracy", value, 0.0, 1.0, 100, 0.25) for name, value in values.items()}
    asked = [chat.Asked(task, [], True) for task in chat.PARTS]
    mean = chat.chat_core(asked, scores)
    assert mean and mean.value is not None and mean.task == "ChatCORE"
    assert mean.value == pytest.approx((0.5 + 0 + 0.2 + 0.1 + 0) / 5)
    by_hand = [(0.625 * 0.375, 0.75), (0.25 * 0.75, 0.75), (0.4 * 0.6, 0.75), (0.1 * 0.9, 1.0)]
    error = math.sqrt(sum(v / 100 / scale**2 for v, scale in by_hand)) / 5
    assert mean.high == pytest.approx(mean.value + 1.959964 * error)
    cut = chat.chat_core([*asked[:4], asked[4]._replace(whole=False)], scores)
    assert cut and cut.task == "mean of 5 of ChatCORE's 5 tasks, not all questions"
    left = chat.chat_core(asked, scores | {"mmlu": replace(scores["mmlu"], skipped=3)})
    assert left and left.task == "mean of 5 of ChatCORE's 5 tasks, 3 questions left out"
    four = chat.chat_core(asked[:4], {name: scores[name] for name in list(values)[:4]})
    assert four and four.task == "mean of 4 of ChatCORE's 5 tasks"
    assert chat.chat_core([chat.Asked(chat.TASKS[5], [], True)], {"spelling": scores["mmlu"]}) is None


@pytest.mark.usefixtures("trusted")
def test_a_base_model_continues_text(folder: Path) -> None:
    code, mmlu = (one.task.task(one.items) for one in asked_of(folder, "humaneval", "mmlu")[::-1])
    assert code.base_prompt(code.items(0, 1)[0]) == CODE["prompt"] and "\ndef" in code.base_stop
    assert mmlu.base_prompt(mmlu.items(0, 1)[0]).endswith("\nC) oak\nAnswer:")


def test_the_command_asks_and_finds_planted_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = toy_recipe("llama", context=128)
    text = tmp_path / "text.txt"
    planted = "the miller of the old valley ground seven sacks of corn on a cold night"
    text.write_text(f"Some words before, {planted} and 7 more words after it.\n" * 400, encoding="utf-8")
    write_run(tmp_path, replace(recipe, data=str(text)))
    rows = [{**MMLU, "question": f"{number} questions"} for number in range(3)] + [{**MMLU, "question": planted}]
    write_rows(tmp_path / "data/mmlu.jsonl", rows)
    flags = ("--stage", "pretrain", "--tasks", "chat/mmlu", "chat/counting", "--chat-data", str(tmp_path / "data"))
    lines = evaluate(tmp_path, *flags, "--limit", "4", "--contamination")
    of_chat = {line["task"]: line for line in lines if line["task"].startswith("chat/")}
    assert of_chat.keys() == {"chat/mmlu", "chat/counting"} and of_chat["chat/mmlu"]["contaminated"] == 0.25
    assert of_chat["chat/counting"]["contaminated"] == 0.0
    assert lines[-1]["task"] == "mean of 1 of ChatCORE's 5 tasks"
    assert "  chat/mmlu                    25.00%, accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10.", "10"),
        ("It is $1,080.00!", "1080"),
        ("#### 18", "18"),
        ("9-4", "4"),
        ("x = -5.5.", "-5.5"),
        ("-$3 or $-4", "-4"),
        (".5", "0.5"),
        ("12,345,678 people", "12345678"),
        ("1, 2 and 3", "3"),
        ("(2)-1", "1"),
        ("x = −3", "-3"),
        ("−$1,080", "-1080"),
        ("–3 °C", "-3"),
        ("9−4 or 9–4", "4"),
        ("12\u202f345\u2009678 people", "12345678"),
    ],
)
def test_numbers_are_read_by_value(text: str, value: str) -> None:
    assert last_number(text) == Decimal(value) and is_right_number(question("?", value), text)
    assert not is_right_number(question("?", value), "none") and not is_right_number(question("?", "77"), text)


def test_files_are_found_and_practised(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1\n#### {n + 1}"} for n in range(40)]
    compressed = write_rows(tmp_path / "deep/train.jsonl.gz", rows)
    environment = load_environment("gsm8k", tmp_path)
    item = draw_item(environment, "3")
    assert item.answer in [str(n + 1) for n in range(40)] and item == draw_item(environment, "3")
    assert environment.reward(item, f"so ${item.answer}.00.") == 1 and environment.reward(item, "99") == 0
    (tmp_path / "train.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="train has several files"):
        load_environment("gsm8k", tmp_path)
    with pytest.raises(FileNotFoundError, match="gsm8k reads train.jsonl: name its folder with --rl.data$"):
        load_environment("gsm8k")
    (tmp_path / "train.jsonl").rename(tmp_path / "other.jsonl")
    compressed.unlink()
    with pytest.raises(FileNotFoundError, match="name its folder with --rl.data, .* has none"):
        load_environment("gsm8k", tmp_path)
