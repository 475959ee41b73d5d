"""Structured outputs and tools of the caller, as OpenAI's own client uses them, from an untrained model."""

import json
import re
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.serve.conftest import NAME
from tests.support.toy_engine import toy_tokenizer

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


def test_a_tool_s_output_goes_back(client: openai.OpenAI) -> None:
    """The official client's loop: ask, call, answer the call, ask again."""
    first = client.chat.completions.create(
        model=NAME, messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=90
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    output = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 °C"}
    again: list[Any] = [*HELLO, message, output]
    reply = client.chat.completions.create(model=NAME, messages=again, tools=TOOLS, max_tokens=20)
    assert reply.choices[0].message.role == "assistant"


def test_a_model_that_may_not_call_does_not(client: openai.OpenAI) -> None:
    """The toy model likes the tool token with this bias, and calls at once; with "none" it cannot."""
    start = str(toy_tokenizer().special("<|tool_start|>"))
    body: dict[str, Any] = {"model": NAME, "messages": HELLO, "tools": TOOLS, "max_tokens": 90}
    free = client.chat.completions.create(**body, logit_bias={start: 100})
    assert free.choices[0].finish_reason == "tool_calls"
    bound = client.chat.completions.create(**body, logit_bias={start: 100}, tool_choice="none", seed=2)
    assert bound.choices[0].message.tool_calls is None and bound.choices[0].finish_reason != "tool_calls"
    assert not hasattr(bound.choices[0].message, "parts")
