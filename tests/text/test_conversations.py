"""Conversations as other projects write them, against quern's own format written by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.mixture.sources import read_rows
from quern.text.chat import parts, render, validate
from quern.text.conversations import to_messages
from quern.text.sources import list_talks
from quern.text.tokenizer import Tokenizer
from tests.support.rows import write_rows
from tests.support.small_text import read_conversations

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
BRIEF = {"role": "system", "content": "Be brief."}
TURNS = [BRIEF, USER, ANSWER]
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
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),  # as in a table
        (ALPACA, [USER, ANSWER]),
        ({**ALPACA, "input": "1 2"}, [{**USER, "content": "hi\n\n1 2"}, ANSWER]),
        ({"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT["conversations"]]}, TURNS),
        ({**SHAREGPT, "system": "Be brief.", "tools": "[]"}, TURNS),
        ({"messages": TURNS, "system": "Be brief."}, TURNS),
        ({"messages": [{**BRIEF, "role": "developer"}, USER, ANSWER], "system": None}, TURNS),
        (
            {**ALPACA, "history": [["one", "1"]], "system": "Be brief."},
            [BRIEF, {"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}, USER, ANSWER],
        ),
        ({"messages": [{**USER, "content": [text("h"), text("i")]}, {**ANSWER, "weight": None}]}, [USER, ANSWER]),
    ],
)
def test_sharegpt_and_alpaca(record: Any, expected: list[dict[str, Any]]) -> None:
    assert to_messages(record) == expected


def test_several_calls_get_their_own_outputs() -> None:
    """The same call twice, answers in another order, a second round, arguments as an object, a last call unanswered."""
    weather = {"city": "Köln"}
    calls = [call("weather", weather, 1), call("weather", json.dumps(weather), 2), call("now", "{}", 3)]
    messages = [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        *(answer(2, "rain"), answer(3, [text("noon")]), answer(1, "sun")),
        {"role": "assistant", "tool_calls": [call("calculator", "not JSON", 4)]},
    ]
    spelled = '{"name":"weather","arguments":{"city":"Köln"}}'
    expected = [
        text("Let me see."),
        *(text(spelled, "tool"), text("sun", "output")),
        *(text(spelled, "tool"), text("rain", "output")),
        *(text('{"name":"now","arguments":{}}', "tool"), text("noon", "output")),
        text("not JSON", "tool"),
    ]
    found = to_messages(messages)
    assert found == [USER, {"role": "assistant", "content": expected}]
    validate(found)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "a", "answer": "b"}, "it has only 'question', 'answer': a conversation is .*ShareGPT.*Alpaca"),
        ({"conversations": [{"from": "bing", "value": "hi"}]}, "message 1 is from 'bing': use one of human, user, gpt"),
        ([USER, answer(0, "42")], "message 2 is a tool's output, and no tool_calls before it"),
        ([USER, {"role": "assistant", "content": None}], "message 2: content must be text"),
        ({"messages": [BRIEF, USER, ANSWER], "system": "Be long."}, "two system messages, one of them beside"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "message 2 has the weight 0.5: use 1, or 0"),
        ({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}, 'each of "tools" is {"type": "function", '),
        ({"messages": [USER, ANSWER], "tools": ["weather"]}, "messages, tools and calls that are text must be"),
        ({"messages": "[{'role': 'user'}]"}, r"messages, tools and calls that are text must be JSON \(Expecting"),
        ({"messages": [USER, ANSWER], "tools": "[" * 100_000}, r"that are text must be JSON \(maximum recursion"),
        ([{"role": ["user"], "content": "hi"}], "message 1"),
        ({**ALPACA, "history": [USER]}, '"history" is a list of questions with their answers'),
        ({**ALPACA, "history": [["one"]]}, '"history" is a list of questions with their answers'),
    ],
)
def test_what_is_no_conversation_says_what_is(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_messages(record)


TOLD = 'You can call these tools, as {"name":"…","arguments":{…}}:\n{"name":"sky","parameters":{"type":"object"}}'
SKY: dict[str, Any] = {"name": "sky", "parameters": {"type": "object"}}
BLUE = [text('{"name":"sky","arguments":{"at":"noon"}}', "tool"), text("blue", "output"), text("It is blue.")]


@pytest.mark.parametrize(
    "record",
    [
        {
            "messages": [
                *(USER, {"role": "assistant", "content": None, "tool_calls": [call("sky", '{"at": "noon"}')]}),
                *(answer(0, "blue"), {"role": "assistant", "content": "It is blue."}),
            ],
            "tools": [{"type": "function", "function": {**SKY, "strict": True, "description": None}}],
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "sky", "arguments": '{"at":"noon"}'}},
                {"role": "function", "name": "sky", "content": "blue"},
                {"role": "assistant", "content": "It is blue."},
            ],
            "functions": [SKY],
        },
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "function_call", "value": '{"name": "sky", "arguments": {"at": "noon"}}'},
                {"from": "observation", "value": "blue"},
                {"from": "gpt", "value": "It is blue."},
            ],
            "tools": json.dumps([SKY]),
        },
    ],
    ids=["OpenAI's tools", "OpenAI's functions", "ShareGPT's function_call"],
)
def test_tools_are_described_and_called_as_the_server_writes_them(record: dict[str, Any]) -> None:
    told = {"role": "system", "content": TOLD}
    assert to_messages(record) == [told, USER, {"role": "assistant", "content": BLUE}]
    begun = to_messages({**record, "system": "Be brief."})
    assert begun[0] == {"role": "system", "content": f"Be brief.\n\n{TOLD}"}


@pytest.mark.parametrize(("key", "no", "yes"), [("weight", 0, 1), ("train", False, True), ("loss", False, None)])
def test_a_reply_of_weight_0_is_read_and_not_learned(key: str, no: Any, yes: Any) -> None:
    """Also where it is a call, and where the same turn goes on with a reply that is learned."""
    wrong, right = {**ANSWER, key: no}, {**ANSWER, key: yes, "content": "right"}
    asking = {"role": "assistant", "content": "Hm.", "tool_calls": [call("calculator", '{"x": "1+1"}')]}
    tokenizer = Tokenizer.train(["hello right"], 300)
    for turns, learned in [
        ([USER, wrong, USER, right], "right<|assistant_end|>"),
        ([USER, {**asking, key: no}, answer(0, "2"), right], "right<|assistant_end|>"),
        ([USER, {**asking, key: yes}, answer(0, "2"), wrong], "Hm.<|tool_start|>1+1<|tool_end|>"),
        ([USER, wrong], ""),
    ]:
        ids, mask = render(tokenizer, to_messages({"messages": turns}))
        assert tokenizer.decode(ids[mask].tolist()) == learned
        plain = [{name: value for name, value in turn.items() if name != key} for turn in turns]
        assert (ids == render(tokenizer, to_messages(plain))[0]).all()


def test_every_shape_comes_from_every_file(tmp_path: Path) -> None:
    shapes = [SHAREGPT, ALPACA, {"messages": [USER, ANSWER]}, [USER, ANSWER]]
    write_rows(tmp_path / "a.jsonl", shapes)
    (tmp_path / "b.json").write_text(json.dumps(shapes), encoding="utf-8")
    write_rows(tmp_path / "c.parquet", [SHAREGPT] * 2)
    write_rows(tmp_path / "d.parquet", [ALPACA] * 2)
    for name in ("README.md", "notes.txt"):  # of no use here: said, not read
        (tmp_path / name).write_text("x", encoding="utf-8")
    said: list[str] = []
    assert list(read_conversations(tmp_path, said.append)) == [[USER, ANSWER]] * 12
    assert said[1:] == [
        "conversations: ignoring README.md (1 B), notes.txt (1 B)",
        "conversations: keys that are not used, with the number of records: 'id' in 4",
    ]


def test_conversations_without_an_answer_are_skipped_or_refused(tmp_path: Path) -> None:
    said: list[str] = []
    path = write_rows(tmp_path / "a.jsonl", [[USER], [USER, ANSWER], [USER]])
    assert list(read_conversations(path, said.append)) == [[USER, ANSWER]]
    assert said[-1] == f"conversations: skipped 2 without an assistant's turn to learn, the first is {path}, line 1"
    write_rows(path, [[USER], [USER, {**ANSWER, "weight": 0}]])
    with pytest.raises(ValueError, match="a.jsonl, line 1: no assistant's turn of the source is learned: add .*give"):
        list(read_conversations(path))


def test_parquet_gives_the_tokens_of_json_lines(tmp_path: Path) -> None:
    """Parquet gives every object the fields of all: null arguments and null parts of schemas come from that."""

    def row(name: str, arguments: Any, schema: Any) -> dict[str, Any]:
        asking = {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]}
        tool = {"type": "function", "function": {"name": name, "parameters": schema}}
        return {"messages": [USER, asking, answer(0, "6"), ANSWER], "tools": [tool]}

    rows = [
        row("weather", {"city": "Rome", "at": {"day": 2}}, {"type": "object", "required": ["city"]}),
        row("many", {"list": [{"a": 1}, {"b": 2}]}, {"type": "object", "properties": {"list": {"type": "array"}}}),
        {**row("calculator", {"expression": "2*3"}, {}), "tools": None},
    ]
    found = list(read_conversations(write_rows(tmp_path / "talks.parquet", rows)))
    assert found == list(read_conversations(write_rows(tmp_path / "talks.jsonl", rows)))
    calls = [part["text"] for messages in found for part in parts(messages[-1]) if part["type"] == "tool"]
    assert calls == [
        '{"name":"weather","arguments":{"city":"Rome","at":{"day":2}}}',
        '{"name":"many","arguments":{"list":[{"a":1},{"b":2}]}}',
        "2*3",
    ]


@pytest.mark.parametrize(("time", "unit"), [(1_700_000_000_123_456_789, "ns"), (10**18, "us")])
def test_a_time_that_python_cannot_hold_is_an_error_that_names_the_file(tmp_path: Path, time: int, unit: Any) -> None:
    kind = pa.struct([("role", pa.string()), ("content", pa.string()), ("time", pa.timestamp(unit))])
    talk = pa.array([[{**USER, "time": time}, {**ANSWER, "time": time}]], pa.list_(kind))
    pq.write_table(pa.table({"messages": talk}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: a column holds a value that Python has no form for .*: leave it"):
        list(read_conversations(tmp_path / "a.parquet"))


CHAT = """12/03/24, 18:05 - Messages and calls are end-to-end encrypted.
12/03/24, 18:05 - Anna: Hello Ben
are you there?
[12/03/24, 6:06:10 PM] Ben: Yes: here!
12/03/24, 18:07 - Ben: <Media omitted>
12/03/24, 18:08 - Anna: Fine
13/03/24, 08:08 - Ben: Morning
13/03/24, 08:09 - Anna: Hi
"""


def test_a_chat_that_whatsapp_exported_is_a_conversation_a_day(tmp_path: Path) -> None:
    path = tmp_path / "chat.txt"
    path.write_text(CHAT, encoding="utf-8")
    talks = {
        who: [[m["content"] for m in talk] for talk, _ in read_rows(list_talks(path), column=who)]
        for who in ("Anna", "Ben")
    }
    assert talks == {
        "Anna": [["Yes: here!", "Fine"], ["Morning", "Hi"]],
        "Ben": [["Hello Ben\nare you there?", "Yes: here!"]],
    }
    with pytest.raises(ValueError, match="one of Anna, Ben: name that one, as --conversations FILE,column=Anna"):
        list(read_rows(list_talks(path)))
    path.write_text("12.03.24, 18:05 - +49 123: Hello", encoding="utf-8")
    with pytest.raises(ValueError, match=r"as --conversations 'FILE,column=\+49 123'$"):
        list(read_rows(list_talks(path)))


def test_what_chatgpt_exported_is_the_branch_that_was_shown_last(tmp_path: Path) -> None:
    said = {"a": ("system", "", None), "b": ("user", "Hi", "a"), "old": ("assistant", "No.", "b"),
            "c": ("assistant", "Hello!", "b"), "d": ("tool", "x", "c"), "e": ("assistant", "More.", "d")}  # fmt: skip
    nodes = {
        name: {"message": {"author": {"role": role}, "content": {"parts": [text, {"image": 1}]}}, "parent": parent}
        for name, (role, text, parent) in said.items()
    }
    rows = [{"title": "t", "mapping": nodes, "current_node": "e"}, {"prompt": "What?", "completion": "That."}]
    (tmp_path / "conversations.json").write_text(json.dumps(rows), encoding="utf-8")
    talks = [[m["content"] for m in talk] for talk, _ in read_rows(list_talks(tmp_path / "conversations.json"), print)]
    assert talks == [["Hi", "Hello!\nMore."], ["What?", "That."]]
