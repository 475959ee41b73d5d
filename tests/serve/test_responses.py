"""`/v1/responses` as OpenAI's own client sees it: the chat's answer in another shape, whole = streamed."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.serve.conftest import NAME

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL: Any = {"type": "function", "name": "count", "parameters": {**PARAMETERS, "additionalProperties": False}}
FORM = {"type": "json_schema", "name": "n", "schema": {**PARAMETERS, "additionalProperties": False}, "strict": True}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """A client that takes no answer without all of a response's fields."""
    how: dict[str, Any] = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
    with openai.OpenAI(base_url=f"{url}/v1", **how) as client:
        yield client


def test_the_text_is_the_chat_s(client: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    chat = client.chat.completions.create(model=NAME, messages=said, temperature=0, max_tokens=20)
    ask: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 20}
    forms: list[dict[str, Any]] = [
        {"input": "Hello?"},
        {"input": [{"role": "user", "content": "Hello?"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello?"}]}]},
    ]
    for given in forms:
        answer: Any = client.responses.create(**ask, instructions="Be brief.", **given)
        assert answer.output_text == chat.choices[0].message.content
        assert answer.object == "response" and answer.id.startswith("resp_") and answer.usage and chat.usage
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == chat.usage.completion_tokens
        cut = chat.choices[0].finish_reason == "length"
        assert answer.status == ("incomplete" if cut else "completed")
        assert (answer.incomplete_details is not None) == cut
    # The answer goes back as it came.
    again: list[Any] = [*said[1:], *(item.model_dump(exclude_none=True) for item in answer.output), said[1]]
    assert client.responses.create(**ask, input=again).object == "response"


@pytest.mark.parametrize("more", [{}, {"text": {"format": FORM}}, {"tools": [TOOL], "tool_choice": "required"}])
def test_stream_equals_non_stream(client: openai.OpenAI, more: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": NAME, "input": "How many?", "temperature": 0, "max_output_tokens": 60, **more}
    whole: Any = client.responses.create(**body)
    events: list[Any] = list(client.responses.create(**body, stream=True))
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
        assert call.type == "function_call" and call.name == "count" and not text
        jsonschema_rs.validator_for(PARAMETERS).validate(json.loads(call.arguments))
        told = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert told == [call.arguments]
        items = [{"role": "user", "content": "How many?"}, call.model_dump(exclude_none=True)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        assert client.responses.create(model=NAME, input=items, tools=[TOOL], max_output_tokens=20).output is not None
    elif more:
        jsonschema_rs.validator_for(PARAMETERS).validate(json.loads(text))
