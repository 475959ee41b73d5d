"""Structured outputs and tools of the caller, as OpenAI's own client uses them, from an untrained model."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from quern.serve.requests.forms import Tool
from quern.serve.requests.messages import ChatMessage, turns
from quern.serve.server import create_app
from tests.support.http_server import running
from tests.support.toy_engine import toy_engine, toy_tokenizer

NAME = "toy"
HELLO: list[Any] = [{"role": "user", "content": "Weather in Köln?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[Any] = [WEATHER, CLOCK]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = toy_engine(context=512)
    with running(create_app({NAME: engine})) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_reply_is_json_of_the_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    body: dict[str, Any] = {"model": NAME, "messages": HELLO, "response_format": form, "max_tokens": 80, "n": 3}
    whole = client.chat.completions.create(**body, seed=1)
    for choice in whole.choices:
        assert choice.finish_reason == "stop" and choice.message.content
        jsonschema_rs.validator_for(CITY).validate(json.loads(choice.message.content))
    texts = [""] * 3
    for chunk in client.chat.completions.create(**body, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_json_object_an_expression_and_a_choice(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 60}
    anything = client.chat.completions.create(**ask, response_format={"type": "json_object"}, seed=4)
    assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)
    for extra, pattern in (
        ({"regex": "[0-9]{2}:[0-9]{2}"}, "[0-9]{2}:[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
    ):
        answer = client.chat.completions.create(**ask, extra_body={"structured_outputs": extra}, seed=4)
        assert re.fullmatch(pattern, answer.choices[0].message.content or "")
        text = client.completions.create(
            model=NAME, prompt="At", max_tokens=20, extra_body={"structured_outputs": extra}, seed=4
        )
        assert re.fullmatch(pattern, text.choices[0].text) and text.choices[0].finish_reason == "stop"
    schema = client.completions.create(
        model=NAME, prompt="At", max_tokens=60, extra_body={"structured_outputs": {"json": CITY}}
    )
    jsonschema_rs.validator_for(CITY).validate(json.loads(schema.choices[0].text))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_of_a_tool_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "seed": 6}
    [whole] = client.chat.completions.create(**body, max_tokens=90).choices
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert whole.message.tool_calls is not None
    [call] = whole.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name in (["weather"] if choice != "required" else ["weather", "clock"])
    schema = CITY if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
    jsonschema_rs.validator_for(schema).validate(json.loads(call.function.arguments))
    chunks = list(client.chat.completions.create(**body, max_tokens=90, stream=True))
    told = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert [(one.index, one.function and one.function.model_dump()) for one in told] == [
        (0, call.function.model_dump())
    ]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_a_tool_s_output_goes_back(client: openai.OpenAI, url: str) -> None:
    """The official client's loop: ask, call, answer the call, ask again; the output stands in the assistant's turn."""
    first = client.chat.completions.create(
        model=NAME, messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=90
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    output = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 °C"}
    again: list[Any] = [*HELLO, message, output]
    reply = client.chat.completions.create(model=NAME, messages=again, tools=TOOLS, max_tokens=20)
    assert reply.choices[0].message.role == "assistant"
    shown = [*HELLO, message.model_dump(exclude_none=True), output]
    tokens = httpx.post(f"{url}/tokenize", json={"messages": shown}).json()["tokens"]
    tokenizer = toy_tokenizer()
    text = tokenizer.decode_bytes([id for id in tokens if id < tokenizer.bos]).decode("utf-8")
    assert tokens[-1] == tokenizer.special("<|output_end|>") and text.startswith("Weather in Köln?")
    assert text.endswith("}12 °C")


def test_turns_join_calls_outputs_and_what_follows() -> None:
    def call(id: str, name: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("a", "clock"), call("b", "date")]},
        {"role": "tool", "tool_call_id": "b", "content": "Monday"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "Monday noon."},
        {"role": "user", "content": "Thanks."},
    ]
    found = turns([ChatMessage.model_validate(message) for message in messages], [Tool.model_validate(CLOCK)])
    told = 'You can call these tools, as {"name":"…","arguments":{…}}:\n{"name":"clock"}'
    assert found == [
        {"role": "system", "content": told},
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool", "text": '{"name":"clock","arguments":{}}'},
                {"type": "output", "text": "noon"},
                {"type": "tool", "text": '{"name":"date","arguments":{}}'},
                {"type": "output", "text": "Monday"},
                {"type": "text", "text": "Monday noon."},
            ],
        },
        {"role": "user", "content": "Thanks."},
    ]


def test_a_model_that_may_not_call_does_not(client: openai.OpenAI) -> None:
    """The toy model likes the tool token with this bias, and calls at once; with "none" it cannot."""
    start = str(toy_tokenizer().special("<|tool_start|>"))
    body: dict[str, Any] = {"model": NAME, "messages": HELLO, "tools": TOOLS, "max_tokens": 90}
    free = client.chat.completions.create(**body, logit_bias={start: 100})
    assert free.choices[0].finish_reason == "tool_calls"
    bound = client.chat.completions.create(**body, logit_bias={start: 100}, tool_choice="none", seed=2)
    assert bound.choices[0].message.tool_calls is None and bound.choices[0].finish_reason != "tool_calls"
    assert not hasattr(bound.choices[0].message, "parts")


@pytest.mark.parametrize(
    ("change", "words", "param"),
    [
        ({"response_format": {"type": "xml"}}, "it is {", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "which needs it", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
            "Invalid type: strin",
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}},
                "max_tokens": 5,
            },
            "ends within 5 tokens",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "exactly one of", "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "unclosed group", "structured_outputs.regex"),
        ({"tools": [{"type": "function"}]}, "Missing required parameter", "tools[0].function"),
        ({"tools": [CLOCK, CLOCK]}, "two of them are called 'clock'", "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "max_tokens": 5}, "ends within 4 tokens", "tools"),
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mill"}}},
            "'mill' is none of the tools: weather, clock",
            "tool_choice",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
            "Invalid type: x",
            "tools[0].function.parameters",
        ),
        (
            {"messages": [*HELLO, {"role": "tool", "content": "1", "tool_call_id": "a"}]},
            "must be the id of a call",
            "messages[1].tool_call_id",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{"}}
                        ],
                    },
                ]
            },
            "it is not JSON",
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"messages": [*HELLO, {"role": "assistant"}]}, "send a text, or tool_calls", "messages[1].content"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(url: str, change: dict[str, Any], words: str, param: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json={"model": NAME, "messages": HELLO, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"] and error["param"] == param, error
