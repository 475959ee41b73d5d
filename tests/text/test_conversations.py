"""Conversations as other projects write them, against quern's own format written by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.text.chat import validate
from quern.text.conversations import to_messages
from quern.text.documents import read_conversations

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "id": 7}
ALPACA = {"instruction": "hi", "input": "", "output": "hello"}


def text(value: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": value}


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(number: int, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (SHAREGPT, [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        (ALPACA, [USER, ANSWER]),
        ({"instruction": "hi", "output": "hello"}, [USER, ANSWER]),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."},
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Add.\n\n1 2"},
                {"role": "assistant", "content": "3"},
            ],
        ),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT["conversations"]]},
            [{"role": "system", "content": "Be brief."}, USER, ANSWER],
        ),
    ],
)
def test_sharegpt_and_alpaca(record: Any, expected: list[dict[str, Any]]) -> None:
    assert to_messages(record) == expected


def test_a_tool_call_its_output_and_the_answer_are_one_turn() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call("calculator", '{"expression": "6*7"}')]},
        answer(0, "42"),
        {"role": "assistant", "content": "It is 42.", "tool_calls": None},
        USER,
        ANSWER,
    ]
    parts = [text("6*7", "tool"), text("42", "output"), text("It is 42.")]
    assert to_messages(messages) == [USER, {"role": "assistant", "content": parts}, USER, ANSWER]


def test_several_calls_get_their_own_outputs() -> None:
    """The same call twice, answers in another order, a second round, arguments as an object, a last call unanswered."""
    weather = {"city": "Köln"}
    messages = [
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [call("weather", weather, 1), call("weather", json.dumps(weather), 2), call("now", "{}", 3)],
        },
        answer(2, "rain"),
        answer(3, [text("noon")]),
        answer(1, "sun"),
        {"role": "assistant", "tool_calls": [call("calculator", "not JSON", 4)]},
    ]
    spelled = '{"name": "weather", "arguments": {"city": "Köln"}}'
    expected = [
        text("Let me see."),
        *(text(spelled, "tool"), text("sun", "output")),
        *(text(spelled, "tool"), text("rain", "output")),
        *(text('{"name": "now", "arguments": {}}', "tool"), text("noon", "output")),
        text("not JSON", "tool"),
    ]
    found = to_messages(messages)
    assert found == [USER, {"role": "assistant", "content": expected}]
    validate(found)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"question": "hi", "answer": "hello"},
            "it has only 'question', 'answer': a conversation is .*ShareGPT.*Alpaca",
        ),
        ("hi", "it is no object and no list of messages: a conversation is"),
        ({"conversations": [{"from": "bing", "value": "hi"}]}, "message 1 is from 'bing': use one of human, user, gpt"),
        ([USER, answer(0, "42")], "message 2 is a tool's output, and no tool_calls before it"),
        ([USER, {"role": "assistant", "content": None}], "message 2: content must be text"),
        ([USER, USER], "message 2 is from the user, expected the assistant"),
        ([], "the conversation is empty"),
    ],
)
def test_what_is_no_conversation_says_what_is(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_messages(record)


def write(path: Path, records: list[Any]) -> Path:
    lines = [json.dumps(record) for record in records]
    body = "\n".join(lines) if path.suffix == ".jsonl" else f"[{','.join(lines)}]"
    path.write_text(body, encoding="utf-8")
    return path


def test_every_shape_comes_from_every_file(tmp_path: Path) -> None:
    shapes = [SHAREGPT, ALPACA, {"messages": [USER, ANSWER]}, [USER, ANSWER]]
    write(tmp_path / "a.jsonl", shapes)
    write(tmp_path / "b.json", shapes)
    pq.write_table(pa.Table.from_pylist([SHAREGPT] * 2), tmp_path / "c.parquet")
    pq.write_table(pa.Table.from_pylist([ALPACA] * 2), tmp_path / "d.parquet")
    for name in ("README.md", "notes.txt"):  # of no use here: said, not read
        (tmp_path / name).write_text("x", encoding="utf-8")
    said: list[str] = []
    assert list(read_conversations(tmp_path, said.append)) == [[USER, ANSWER]] * 12
    assert len(said) == 2 and said[1] == "conversations: ignoring README.md (1 B), notes.txt (1 B)"


def test_a_file_without_a_known_shape_names_the_shapes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", write(tmp_path / "a.json", [{"question": "a"}])):
        with pytest.raises(
            ValueError, match=rf"{path.name}.*: not a conversation: it has only 'question': a conversat"
        ):
            list(read_conversations(path))


def test_conversations_without_an_answer_are_skipped_or_refused(tmp_path: Path) -> None:
    said: list[str] = []
    path = write(tmp_path / "a.jsonl", [[USER], [USER, ANSWER], [USER]])
    assert list(read_conversations(path, said.append)) == [[USER, ANSWER]]
    assert said[-1] == f"conversations: skipped 2 without an assistant's turn, the first is {path}, line 1"
    write(path, [[USER], [USER]])
    with pytest.raises(ValueError, match="a.jsonl, line 1: there is no assistant's turn, nor in any other"):
        list(read_conversations(path))
