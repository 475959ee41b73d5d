"""What OpenAI accepts is accepted, as the order of roles that models are trained on; errors name what was sent."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from quern.serve.server import create_app
from quern.serve.worker import Limits
from quern.text.chat import render, render_prompt
from tests.support.http_server import running
from tests.support.toy_engine import toy_engine, toy_tokenizer

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZER = toy_tokenizer()
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA = {**PARAMETERS, "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
COUNT = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(create_app({"toy": toy_engine(context=512, max_rows=32)}, limits=Limits(waiting=100))) as base:
        yield base


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    first = {CHAT: {"messages": [said("user", "?")]}, TEXT: {"prompt": "?"}, RESPONSES: {"input": "?"}}
    return httpx.post(url + path, json={"model": "toy", **first.get(path, {}), **body}, timeout=60)


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


OUTPUT = {"role": "tool", "tool_call_id": "c", "content": "12:00"}
NOW: list[Any] = [{"type": "tool", "text": '{"name":"now","arguments":{}}'}, {"type": "output", "text": "12:00"}]
ORDERS: dict[str, tuple[list[Any], list[Any]]] = {
    "two users": ([said("user", "A"), said("user", [{"type": "text", "text": "B"}])], [said("user", "A\n\nB")]),
    "two assistants": (
        [said("user", "A"), said("assistant", "B"), said("assistant", "C"), said("user", "D")],
        [said("user", "A"), said("assistant", "B\n\nC"), said("user", "D")],
    ),
    "system later": (
        [said("user", "A"), said("system", "S"), said("developer", "T"), said("user", "B")],
        [said("system", "S\n\nT"), said("user", "A\n\nB")],
    ),
    "system alone": ([said("system", "S")], [said("system", "S"), said("user", "")]),
    "assistant first": (
        [said("assistant", "A"), said("user", "B")],
        [said("user", ""), said("assistant", "A"), said("user", "B")],
    ),
    "assistant last": ([said("user", "A"), said("assistant", "B")], [said("user", "A"), said("assistant", "B")]),
    "text and then a call": (
        [said("user", "A"), said("assistant", "B"), call("{}"), OUTPUT],
        [said("user", "A"), said("assistant", [{"type": "text", "text": "B"}, *NOW])],
    ),
    "no arguments": ([said("user", "A"), call(""), OUTPUT], [said("user", "A"), said("assistant", NOW)]),
}


@pytest.mark.parametrize(("messages", "trained"), ORDERS.values(), ids=ORDERS)
def test_any_order_of_roles_is_read_as_a_trained_one(url: str, messages: list[Any], trained: list[Any]) -> None:
    prompt = render_prompt(TOKENIZER, trained)
    if trained[-1]["role"] == "assistant":  # continued in its turn, whose end is not written yet
        assert prompt == render(TOKENIZER, trained)[0][:-1].tolist()
    assert post(url, "/tokenize", {"messages": messages}).json()["tokens"] == prompt
    answer = post(url, CHAT, {"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == len(prompt)
    if all(message.get("content") and message["role"] != "tool" for message in messages):
        items = [{**one, "content": one["content"] if isinstance(one["content"], str) else "B"} for one in messages]
        answer = post(url, RESPONSES, {"input": items, "max_output_tokens": 2})
        assert answer.status_code == 200 and answer.json()["usage"]["input_tokens"] == len(prompt)


def test_instructions_and_a_developer_message_are_one_system_message(url: str) -> None:
    given = {"instructions": "S", "input": [said("developer", "T"), said("user", "A")], "max_output_tokens": 2}
    prompt = render_prompt(TOKENIZER, [{"role": "system", "content": "S\n\nT"}, {"role": "user", "content": "A"}])
    assert post(url, RESPONSES, given).json()["usage"]["input_tokens"] == len(prompt)


def test_top_p_of_0_takes_the_likeliest_token(url: str) -> None:
    greedy = post(url, CHAT, {"temperature": 0, "max_tokens": 20}).json()["choices"]
    for seed in range(3):
        assert post(url, CHAT, {"top_p": 0, "seed": seed, "max_tokens": 20}).json()["choices"] == greedy


def test_128_choices_in_turn_on_32_seats_and_more_than_can_wait(url: str) -> None:
    answer = post(url, CHAT, {"n": 128, "max_tokens": 2}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))
    refused = post(url, TEXT, {"prompt": ["?"] * 2, "n": 128, "max_tokens": 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    assert "asks for 256 replies" in refused.text and "up to 132 at once" in refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_with_tools_and_a_form_the_reply_is_a_call_or_a_text_of_the_form(url: str, stream: bool) -> None:
    start, ask = str(TOKENIZER.special("<|tool_start|>")), {"tools": [COUNT], "response_format": FORM, "stream": stream}
    reasons = set()
    for seed in range(2):
        for bias in (-100, 100):
            body = {"logit_bias": {start: bias}, "max_tokens": 40, "seed": seed, **ask}
            text, called, reason = _reply(post(url, CHAT, body), stream)
            reasons.add(reason)
            assert (reason == "tool_calls") == (bias == 100) == bool(called) and bool(text) == (bias == -100)
            jsonschema_rs.validator_for(SCHEMA).validate(json.loads(text or called))
    assert reasons == {"stop", "tool_calls"}
    # A call that does not fit is not begun: the shortest one has more tokens than the shortest text.
    short = {"logit_bias": {start: 100}, "max_tokens": 14, **ask}
    assert _reply(post(url, CHAT, short), stream)[2] == "stop"


def _reply(response: httpx.Response, stream: bool) -> tuple[str, str, str]:
    """Text, arguments of the call, finish reason."""
    assert response.status_code == 200, response.text
    lines = (
        [line[6:] for line in response.text.splitlines() if line.startswith("data: {")] if stream else [response.text]
    )
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    told = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    calls = [one["function"]["arguments"] for message in told for one in message.get("tool_calls", ())]
    text = "".join(message.get("content") or "" for message in told)
    return text, "".join(calls), choices[-1]["finish_reason"]


WRONG_FORM = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "strin"}}}
ITEM = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
ERRORS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [said("user", ["?", IMAGE])]}, "Invalid value", "messages[0].content[0]"),
    (
        CHAT,
        {"messages": [said("user", [{"type": "text", "text": "?"}, IMAGE])]},
        "'image_url' is not supported, use 'text'",
        "messages[0].content[1].type",
    ),
    (CHAT, {"messages": [said("critic", "?")]}, "'critic' is not supported, use 'system'", "messages[0].role"),
    (CHAT, {"messages": [said("user", {"a": 1})]}, "valid string", "messages[0].content"),
    (CHAT, {"structured_outputs": {"regex": "a{50}"}, "max_tokens": 5}, "within 5", "structured_outputs.regex"),
    (TEXT, {"structured_outputs": {"choice": ["a" * 60]}, "max_tokens": 5}, "within 5", "structured_outputs.choice"),
    (CHAT, {"response_format": {"type": "json_object"}, "max_tokens": 1}, "within 1", "response_format"),
    (RESPONSES, {"text": WRONG_FORM}, "'text.format.schema': Invalid type: strin", "text.format.schema"),
    (RESPONSES, {"text": {"format": {**FORM}}}, "Missing required parameter: 'text.format.name'", "text.format.name"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "'xml' is not supported", "text.format.type"),
    (RESPONSES, {"input": "x" * 600}, "'input' already takes", "input"),
    (RESPONSES, {"tools": [COUNT]}, "'tools[0].name'", "tools[0].name"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "'web_search' is not supported, use 'func", "tools[0].type"),
    (
        RESPONSES,
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "x"}}]},
        "'tools[0].parameters': Invalid type: x",
        "tools[0].parameters",
    ),
    (RESPONSES, {"input": [said("user", "?"), {**ITEM, "arguments": "{"}]}, "not JSON", "input[1].arguments"),
    (
        RESPONSES,
        {"instructions": "S", "input": [said("user", "?"), ITEM, {**ITEM, "arguments": "{"}]},
        "'input[2].call_id': another call",
        "input[2].call_id",
    ),
    (RESPONSES, {"input": [said("user", "?"), ITEM, said("user", "?")]}, "has no output yet", "input[2]"),
    (RESPONSES, {"input": [said("user", "?"), ITEM]}, "Invalid value for 'input': the call 'c'", "input"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "Missing", "input[0].arguments"),
    (
        RESPONSES,
        {"instructions": "S", "input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]},
        "'input[0].call_id'",
        "input[0].call_id",
    ),
    (
        RESPONSES,
        {"input": [said("user", [{"type": "input_image", "image_url": "data:,"}])]},
        "'input_image' is not supported",
        "input[0].content[0].type",
    ),
    (RESPONSES, {"text": {"format": {**WRONG_FORM["format"], "schema": SCHEMA}}, "max_output_tokens": 3}, "within 3",
     "text.format.schema"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "words", "param"), ERRORS)
def test_an_error_names_the_field_that_was_sent(
    url: str, path: str, change: dict[str, Any], words: str, param: str
) -> None:
    response = post(url, path, change)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and words in error["message"], error
    if path == RESPONSES:
        assert "messages" not in error["message"] and "response_format" not in error["message"]
