"""What OpenAI accepts is accepted, as the order of roles that models are trained on; errors name what was sent."""

import json
from typing import Any

import httpx
import jsonschema_rs
import pytest

from quern.text.chat import render, render_prompt
from tests.serve.conftest import CHAT, RESPONSES, TEXT, post, said
from tests.support.toy_engine import toy_tokenizer

TOKENIZER = toy_tokenizer()
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA = {**PARAMETERS, "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
COUNT = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


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
