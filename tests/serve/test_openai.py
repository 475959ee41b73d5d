"""The server accepts what OpenAI does: any order of roles, structured outputs, a caller's tools, `/v1/responses`."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from quern.text.chat import render, render_prompt
from tests.serve.conftest import CHAT, NAME, RESPONSES, TEXT, post, said
from tests.support.http_server import web
from tests.support.toy_engine import toy_tokenizer

TOKENIZER = toy_tokenizer()
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA = {**PARAMETERS, "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
COUNT = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
FLAT_FORM = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
FLAT_TOOL: Any = {"type": "function", "name": "count", "parameters": SCHEMA}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


OUTPUT = {"role": "tool", "tool_call_id": "c", "content": "12:00"}
NOW: list[Any] = [{"type": "tool", "text": '{"name":"now","arguments":{}}'}, {"type": "output", "text": "12:00"}]
ORDERS: dict[str, tuple[list[Any], list[Any]]] = {
    "two users": ([said("user", "A"), said("user", ["B", {"type": "text", "text": ""}])], [said("user", "A\n\nB")]),
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
    refused = post(url, TEXT, {"prompt": ["?"] * 3, "n": 128, "max_tokens": 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    assert "asks for 384 replies" in refused.text and "up to 288 at once" in refused.text


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
    pieces = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    lines = pieces if stream else [response.text]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    told = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    calls = [one["function"]["arguments"] for message in told for one in message.get("tool_calls", ())]
    text = "".join(message.get("content") or "" for message in told)
    return text, "".join(calls), choices[-1]["finish_reason"]


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


CITY_FORM = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}


@pytest.mark.parametrize("more", [{"stop": ["e"]}, {"response_format": CITY_FORM, "max_tokens": 80}])
def test_stream_equals_non_stream(client: openai.OpenAI, more: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": HELLO, "seed": 0, "max_tokens": 40, "n": 8, **more}
    whole = client.chat.completions.create(**body)
    texts, ends, used, identifiers = [""] * 8, [""] * 8, [], set()
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        identifiers.add(chunk.id)
        assert chunk.object == "chat.completion.chunk" and chunk.model == NAME
        used.append(chunk.usage)
        for choice in chunk.choices:
            assert not ends[choice.index], "a piece after the finish reason"
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ""
    assert len(identifiers) == 1
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    firsts = [chunk.choices[0].delta for chunk in chunks[:8]]
    assert all(first.role == "assistant" and first.content == "" for first in firsts)
    assert all(choice.delta.role is None for chunk in chunks[8:] for choice in chunk.choices)
    assert chunks[-1].choices == [] and used[:-1] == [None] * (len(used) - 1)
    told, asked = used[-1], whole.usage
    assert told and asked  # the prompt may be cached by then
    assert told.model_copy(update={"prompt_tokens_details": asked.prompt_tokens_details}) == asked
    for choice in whole.choices if "response_format" in more else ():
        assert choice.finish_reason == "stop"
        jsonschema_rs.validator_for(CITY).validate(json.loads(choice.message.content or ""))


def test_a_json_object_an_expression_and_a_choice(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 60}
    begun: dict[str, Any] = {"model": NAME, "prompt": "At", "max_tokens": 60, "seed": 4}
    anything = client.chat.completions.create(**ask, response_format={"type": "json_object"}, seed=4)
    assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)
    for extra, pattern in (
        ({"regex": "[0-9]{2}:[0-9]{2}"}, "[0-9]{2}:[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
    ):
        answer = client.chat.completions.create(**ask, extra_body={"structured_outputs": extra}, seed=4)
        assert re.fullmatch(pattern, answer.choices[0].message.content or "")
        text = client.completions.create(**begun, extra_body={"structured_outputs": extra})
        assert re.fullmatch(pattern, text.choices[0].text) and text.choices[0].finish_reason == "stop"
    schema = client.completions.create(**begun, extra_body={"structured_outputs": {"json": CITY}})
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
    found = [(one.index, one.function and one.function.model_dump()) for one in told]
    assert found == [(0, call.function.model_dump())]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_a_model_that_may_not_call_does_not(client: openai.OpenAI) -> None:
    """The toy model likes the tool token with this bias, and calls at once; with "none" it cannot."""
    start = str(toy_tokenizer().special("<|tool_start|>"))
    body: dict[str, Any] = {"model": NAME, "messages": HELLO, "tools": TOOLS, "max_tokens": 90}
    free = client.chat.completions.create(**body, logit_bias={start: 100})
    assert free.choices[0].finish_reason == "tool_calls"
    bound = client.chat.completions.create(**body, logit_bias={start: 100}, tool_choice="none", seed=2)
    assert bound.choices[0].message.tool_calls is None and bound.choices[0].finish_reason != "tool_calls"
    assert not hasattr(bound.choices[0].message, "parts")


def test_the_published_schema_accepts_what_the_server_accepts(url: str) -> None:
    published = web.get(f"{url}/openapi.json").json()
    schema = published["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check = jsonschema_rs.validator_for({**schema, "components": published["components"]})
    good: list[dict[str, Any]] = [{}, {"foo": 1}, {"n": 2}, {"stop": ["x"]}, {"response_format": {"type": "text"}}]
    good += [{"messages": [{"role": "user", "content": ["?"], "x": 1}]}, {"response_format": {"type": "text", "x": 1}}]
    good += [{"logprobs": False, "top_logprobs": 0}]
    bad: list[dict[str, Any]] = [{"n": 0}, {"temperature": 3}, {"response_format": {"type": "xml"}}]
    for change in (*good, *bad):
        assert check.is_valid({"model": NAME, "messages": HELLO, **change}) is (change in good)
        status = post(url, CHAT, {"messages": HELLO, "max_tokens": 5, **change}).status_code
        assert status == (200 if change in good else 400)


# `/v1/responses`: the chat's answer in another shape, whole = streamed ------------------------------------------


@pytest.fixture
def strict(url: str) -> Iterator[openai.OpenAI]:
    """A client that takes no answer without all of a response's fields."""
    how: dict[str, Any] = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
    with openai.OpenAI(base_url=f"{url}/v1", **how) as client:
        yield client


def test_the_text_of_a_response_is_the_chat_s(strict: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    chat = strict.chat.completions.create(model=NAME, messages=turns, temperature=0, max_tokens=20)
    ask: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 20}
    forms: list[dict[str, Any]] = [
        {"input": "Hello?"},
        {"input": [{"role": "user", "content": "Hello?"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello?"}]}]},
    ]
    for given in forms:
        answer: Any = strict.responses.create(**ask, instructions="Be brief.", **given)
        assert answer.output_text == chat.choices[0].message.content
        assert answer.object == "response" and answer.id.startswith("resp_") and answer.usage and chat.usage
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == chat.usage.completion_tokens
        cut = chat.choices[0].finish_reason == "length"
        assert answer.status == ("incomplete" if cut else "completed")
        assert (answer.incomplete_details is not None) == cut
    # The answer goes back as it came.
    again: list[Any] = [*turns[1:], *(item.model_dump(exclude_none=True) for item in answer.output), turns[1]]
    assert strict.responses.create(**ask, input=again).object == "response"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"text": {"format": FLAT_FORM}},
        {"tools": [FLAT_TOOL], "tool_choice": "required"},
        {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "count"}},
    ],
)
def test_a_streamed_response_is_the_whole_one(strict: openai.OpenAI, more: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": NAME, "input": "How many?", "temperature": 0, "max_output_tokens": 60, **more}
    whole: Any = strict.responses.create(**body)
    events: list[Any] = list(strict.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == last.response.output_text
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == [item.type for item in whole.output]
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(done)))
    if "tools" in more:
        [call] = whole.output
        assert whole.to_dict()["tool_choice"] == more["tool_choice"]
        assert call.type == "function_call" and call.name == "count" and not text
        jsonschema_rs.validator_for(PARAMETERS).validate(json.loads(call.arguments))
        told = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert told == [call.arguments]
        items = [{"role": "user", "content": "How many?"}, call.model_dump(exclude_none=True)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        answer = strict.responses.create(model=NAME, input=items, tools=[FLAT_TOOL], max_output_tokens=20)
        assert answer.output is not None
    elif more:
        jsonschema_rs.validator_for(PARAMETERS).validate(json.loads(text))
