"""A request that cannot be done is a 400 that names the field that the client sent, in the words of its own path."""

import gc
import gzip
import json
import math
import sys
import time
from functools import reduce
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quern.generate.engine import Engine
from quern.serve.gate import Gate
from quern.serve.routes import MAX_BODY_BYTES, MAX_MARKS, marks
from quern.serve.server import LOOPBACK, create_app
from tests.serve.conftest import CHAT, CONTEXT, FIRST, RESPONSES, TEXT, check_error, post, said
from tests.support.http_server import running, web


def schema(of: Any, kind: str = "json_schema") -> dict[str, Any]:
    return {"response_format": {"type": kind, "json_schema": {"name": "x", "schema": of}}}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def called(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", **function("clock", arguments=arguments)}]}


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CLOCK, WRONG = function("clock"), {"type": "strin"}
LEVELS = 250 if sys.version_info < (3, 12) else 650  # JSON's parser reads them, and the prompt cannot be written
DEEP = reduce(lambda inner, _: {"properties": {"a": inner}}, range(LEVELS), WRONG)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
FORM = {"type": "json_schema", "name": "n", "schema": WRONG}
ITEM = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "x", "output": "1"}
NAMED = "Invalid value for '{param}'"
ERRORS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    CHAT: [
        ({"model": 5}, NAMED, "model"),
        ({"messages": []}, "send at least one message", "messages"),
        ({"messages": [said("user", 3)]}, NAMED, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "a user message has 'content'", "messages[0]"),
        ({"messages": [said("tool", "")]}, "must be the id of a call", "messages[0].tool_call_id"),
        ({"messages": [said("user", {"a": 1})]}, "valid string", "messages[0].content"),
        ({"messages": [said("user", ["?", 3])]}, NAMED, "messages[0].content[1]"),
        ({"messages": [said("user", [IMAGE])]}, "'image_url' is not supported, use", "messages[0].content[0].type"),
        ({"messages": [said("critic", "?")]}, "'critic' is not supported, use 'system'", "messages[0].role"),
        ({"messages": [said("user", ""), {"role": "assistant"}]}, "text, or tool_calls", "messages[1].content"),
        ({"messages": [called("{")]}, "it is not JSON", "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called('{"n":1e999}')]}, "it is not JSON", "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called("{}"), said("user", "?")]}, "has no output yet", "messages[1]"),
        ({"temperature": 2.5}, NAMED, "temperature"),
        ({"min_p": 1.5}, NAMED, "min_p"),
        ({"max_tokens": 0}, NAMED, "max_tokens"),
        ({"n": 1000}, NAMED, "n"),
        ({"seed": 2**70}, NAMED, "seed"),
        ({"stop": ""}, "each of 1 to 200 characters", "stop"),
        ({"stop": ["a", ""]}, "each of 1 to 200 characters", "stop[1]"),
        ({"stream": "yes"}, NAMED, "stream"),
        ({"stream_options": {"include_usage": True}}, "only allowed when 'stream' is true", "stream_options"),
        ({"top_logprobs": 3}, "only allowed when 'logprobs' is true", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, NAMED, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "give token ids with numbers", "logit_bias.x"),
        ({"logit_bias": {"\U00016d73": 1}}, "give token ids with numbers", "logit_bias.\U00016d73"),  # a 3 of Kirat Rai
        ({"logit_bias": {str(id): 1 for id in range(1025)}}, "at most 1024 items", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "give token ids with numbers", "logit_bias.5"),
        ({"logit_bias": {"99999": 1}}, "99999 is no token", "logit_bias"),
        ({"stop_token_ids": [-1]}, "-1 is no token", "stop_token_ids"),
        ({"response_format": {"type": "xml"}}, "it is {", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "which needs it", "response_format.json_schema"),
        (schema(WRONG), "Invalid type: strin", "response_format.json_schema.schema"),
        (schema(NUMBER) | {"max_tokens": 3}, "ends within 3 tokens", "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 1}, "within 1", "response_format"),
        ({"structured_outputs": {}}, "exactly one of", "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "unclosed group", "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "x" * 4097}}, "at most 4096 characters", "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a\ud800"}}, "as a unicode string", "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a{50}"}, "max_tokens": 5}, "within 5", "structured_outputs.regex"),
        ({"tools": [{"type": "function"}]}, "Missing required parameter", "tools[0].function"),
        ({"tools": [function("get weather")]}, "should match pattern", "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "two of them are called 'clock'", "tools"),
        ({"tools": [CLOCK], "tool_choice": "required", "max_tokens": 5}, "ends within 4 tokens", "tools"),
        ({"tools": [CLOCK], "tool_choice": function("mill")}, "'mill' is none of the tools: clock", "tool_choice"),
        ({"tools": [function("f", parameters=WRONG)]}, "Invalid type: strin", "tools[0].function.parameters"),
        ({"tools": [function("f", parameters=DEEP)]}, "nested too deep", "tools"),
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
    ],
    TEXT: [
        ({"prompt": []}, "or a list of 1 to 32 of them", "prompt"),
        ({"prompt": ["a"] * 33}, "or a list of 1 to 32 of them", "prompt"),
        ({"prompt": [99999]}, "99999 is no token", "prompt"),
        ({"prompt": "x1 " * 400}, f"context holds {CONTEXT} tokens", "prompt"),
        ({"prompt": "x1 " * 400, "max_tokens": 0, "echo": True}, f"context holds {CONTEXT} tokens", "prompt"),
        ({"max_tokens": 0}, "only with 'echo'", "max_tokens"),
        ({"suffix": "x"}, "fills no gaps", "suffix"),
        ({"best_of": 3}, "set 'n'", "best_of"),
        ({"logprobs": 100}, NAMED, "logprobs"),
        ({"structured_outputs": {"choice": ["a" * 60]}, "max_tokens": 5}, "within 5", "structured_outputs.choice"),
    ],
    RESPONSES: [
        ({"previous_response_id": "resp_1"}, "send the whole conversation in 'input'", "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "send the whole conversation in 'input'", "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "send the whole conversation in 'input'", "prompt"),
        ({"include": ["reasoning.encrypted_content"]}, "leave it out", "include"),
        ({"input": []}, "give a text or at least one message", "input"),
        ({"input": "x" * 600}, "'input' already takes", "input"),
        ({"temperature": 3.0}, NAMED, "temperature"),
        ({"background": True}, NAMED, "background"),
        ({"text": {"format": FORM}}, "'text.format.schema': Invalid type: strin", "text.format.schema"),
        ({"text": {"format": {**FORM, "schema": NUMBER}}, "max_output_tokens": 3}, "within 3", "text.format.schema"),
        ({"text": {"format": schema(NUMBER)["response_format"]}}, "'text.format.name'", "text.format.name"),
        ({"text": {"format": {"type": "xml"}}}, "'xml' is not supported", "text.format.type"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "there are no tools", "tool_choice"),
        ({"tools": [CLOCK]}, "'tools[0].name'", "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not supported, use 'func", "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "parameters": WRONG}]}, "type: strin", "tools[0].parameters"),
        ({"input": [said("user", "?"), {**ITEM, "arguments": "{"}]}, "not JSON", "input[1].arguments"),
        ({"instructions": "S", "input": [said("user", "?"), ITEM, ITEM]}, "another call", "input[2].call_id"),
        ({"input": [said("user", "?"), ITEM, said("user", "?")]}, "has no output yet", "input[2]"),
        ({"input": [said("user", "?"), ITEM]}, "Invalid value for 'input': the call 'c'", "input"),
        ({"input": [{**ITEM, "arguments": None}]}, NAMED, "input[0].arguments"),
        ({"instructions": "S", "input": [OUTPUT]}, "'input[0].call_id'", "input[0].call_id"),
        ({"input": [said("user", [{"type": "input_image"}])]}, "not supported", "input[0].content[0].type"),
    ],
    "/tokenize": [({}, "Send either", "prompt"), ({"prompt": "", "messages": [said("user", "?")]}, "either", "prompt")],
    "/detokenize": [({"tokens": [-1]}, "-1 is no token", "tokens")],
}


@pytest.mark.parametrize(
    ("path", "change", "words", "param"), [(path, *row) for path, rows in ERRORS.items() for row in rows]
)
def test_a_parameter_is_refused_by_name(url: str, path: str, change: dict[str, Any], words: str, param: str) -> None:
    usual, before = 1000, sys.getrecursionlimit()  # PyTorch's compiler raises it
    sys.setrecursionlimit(usual)
    try:
        response = post(url, path, change)
    finally:
        sys.setrecursionlimit(before)
    check_error(response, 400, words.replace("{param}", param), param)
    if path == RESPONSES:
        assert "messages" not in response.text and "response_format" not in response.text


def test_a_prompt_too_long_is_a_400_with_the_numbers(url: str) -> None:
    response = post(url, CHAT, {"messages": [said("user", "x1 " * 400)], "stream": True})
    check_error(response, 400, f"context holds {CONTEXT} tokens", "messages")
    error = response.json()["error"]
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", CONTEXT) and error["n_prompt_tokens"] > 400


OPEN_WEBUI = {
    "chat_id": "local:5f1c",
    "num_ctx": 4096,
    "reasoning_effort": "low",
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "Hello?", "files": [], "timestamp": 1}],
}
"""The fields that Open WebUI sends beside OpenAI's, from a chat and from a model's advanced parameters."""


@pytest.mark.parametrize("stream", [True, False])
def test_fields_of_other_programs_are_ignored_and_named(url: str, stream: bool) -> None:
    def ignored(body: dict[str, Any], path: str = CHAT, status: int = 200) -> str | None:
        response = post(url, path, {"max_tokens": 2, **body})
        assert response.status_code == status, response.text
        return response.headers.get("x-ignored-fields")

    body = {**OPEN_WEBUI, "stream": stream} if stream else {**OPEN_WEBUI, "stream_options": None}
    assert ignored(body) == "chat_id, num_ctx, reasoning_effort, messages[0].files, messages[0].timestamp"
    assert ignored({"stream": stream}) is None
    assert ignored({"reasoning": {"effort": "low"}, "max_tokens": 1}, RESPONSES) == "max_tokens, reasoning"
    marked = {"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}
    assert ignored({"messages": [said("user", [marked])]}) == "messages[0].content[0].cache_control"
    assert ignored({"stream": True, "stream_options": {"continuous_usage_stats": True}}, TEXT) == (
        "stream_options.continuous_usage_stats"
    )
    items = [said("user", [{"type": "input_text", "text": "?", "x": 1}]) | {"y": 2}]
    told = ignored({"input": items, "text": {"verbosity": "low"}, "max_output_tokens": 2}, RESPONSES)
    assert told == "max_tokens, input[0].y, input[0].content[0].x, text.verbosity"
    many = ignored({f"f{n}": n for n in range(3000)})
    assert many == ", ".join([*(f"f{n}" for n in range(20)), "and 2980 more"])
    assert ignored({"a\r\nset-cookie: x": 1, "\ud800": 2}) == r"a\r\nset-cookie: x, \ud800"
    assert ignored({**OPEN_WEBUI, "stream_options": None, "temperature": 9}, status=400) is None


def full(head: str, item: str, tail: str) -> bytes:
    """A body of almost 1 MiB."""
    count = (MAX_BODY_BYTES - len(head) - len(tail)) // (len(item) + 1)
    return (head + ",".join([item] * count) + tail).encode()


BODIES: dict[str, tuple[str, bytes]] = {
    "nothing": (CHAT, b""),
    "half an object": (CHAT, b"{"),
    "a list": (CHAT, b"[]"),
    "a number": (CHAT, b"7"),
    "no UTF-8": (CHAT, b"\xff"),
    "deep": (CHAT, b"[" * 200_000),
    "a long number": (CHAT, b'{"n": ' + b"9" * 5000 + b"}"),
    # As a field of its own, a number that no float holds is ignored; in a tool it would stand in the response.
    "no float": (CHAT, b'{"model": "toy", "messages": [{"role": "user", "content": "?"}], "x": -1e999}'),
    "nan": (CHAT, json.dumps({"model": "toy", **FIRST[CHAT], "x": math.nan}).encode()),
    "-inf": (CHAT, json.dumps({"model": "toy", **FIRST[CHAT], "x": -math.inf}).encode()),
    "objects as input": (RESPONSES, full('{"model":"m","input":[', "{}", "]}")),
    "messages": (CHAT, full('{"model":"m","messages":[', '{"role":"user","content":""}', "]}")),
    "objects as parts": (CHAT, full('{"model":"m","messages":[{"role":"user","content":[', "{}", "]}]}")),
    "unknown fields": (CHAT, full('{"model":"m",', '"a":1', "}")),
    "biases": (CHAT, full('{"model":"m","logit_bias":{', '"x":1', "}}")),
    "prompts": (TEXT, full('{"model":"m","prompt":[', "[]", "]}")),
    "quotes in quotes": (TEXT, b'{"model":"m","prompt":"' + b'\\"' * 500_000),
    "half a list of numbers": (TEXT, full('{"model":"m","prompt":[', "1", ',"x"]}')),
    "nulls": ("/detokenize", full('{"tokens":[', "null", "]}")),
    "objects to tokenize": ("/tokenize", full('{"messages":[', "{}", "]}")),
    # Just below the limit:
    "5,000 objects as input": (RESPONSES, b'{"model":"m","input":[' + b"{}," * 5000 + b"{}]}"),
    "4,000 unknown fields": (RESPONSES, b'{"model":"m"' + b"".join(b',"%d":1' % n for n in range(4000)) + b"}"),
}


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request_are_refused_before_others_notice(url: str, path: str, body: bytes) -> None:
    """Pydantic's errors for 340,000 objects took 70 s and 4 GB."""
    gc.collect()  # of the objects of earlier tests: it takes a slow processor longer than the refusal
    start = time.process_time()
    response = post(url, path, body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    assert time.process_time() - start < 1, "client and server are one process here"


def test_marks_are_counted_outside_of_strings() -> None:
    texts = [json.dumps(text) for text in ("{[:" * 20_000, '"' * 20_000, "\\", 'a\\"{', "")]
    body = '{"a": [1, 2, {"b": null}], "c": [' + ", ".join(texts) + "]}"
    assert marks(bytearray(body.encode())) == 2 + 2 + 3 + 3 + 5
    assert marks(bytearray(b'{"' * 30_000)) > MAX_MARKS


def test_a_missing_parameter_a_wrong_model_media_type_size_path_and_method(url: str) -> None:
    check_error(web.post(url + CHAT, json=FIRST[CHAT]), 400, "Missing required parameter: 'model'", "model")
    for path in FIRST:
        check_error(post(url, path, {"model": "gpt-4"}), 404, "this server has 'toy'", "model")
    check_error(post(url, CHAT, {}, **{"content-type": "text/plain"}), 415, "as JSON")
    check_error(post(url, CHAT, gzip.compress(b"{}"), **{"content-encoding": "gzip"}), 415, "not compressed")
    check_error(post(url, CHAT, b" " * (MAX_BODY_BYTES + 1)), 413, "larger than")
    check_error(web.get(f"{url}/v1/nothing"), 404, "There is nothing at /v1/nothing")
    check_error(web.get(url + CHAT), 405, "GET is not allowed")
    assert web.get(url + CHAT).headers["allow"] == "POST"
    for path in ("/../pyproject.toml", "/%2e%2e/server.py", "/..%2fserver.py", "/app.js/../server.py", "/server.py"):
        assert web.get(url + path).status_code == 404, path


def test_an_error_that_nobody_expected_is_in_both_logs_and_its_answer_has_all_headers(
    engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Request) -> Response:
        raise LookupError("secret")

    lines = list[str]()
    app = create_app({"toy": engine}, Gate(LOOPBACK, log=lines.append, origins=["https://a.example"]))
    app.router.routes.insert(0, Route("/fails", fail))
    with running(app) as url:
        answer = web.get(f"{url}/fails", headers={"origin": "https://a.example"})
    check_error(answer, 500, "The server failed on this request.")
    [line] = map(json.loads, lines)
    assert line["status"] == 500 and line["id"] == answer.headers["x-request-id"]
    assert "access-control-allow-origin" in answer.headers and "LookupError: secret" in capfd.readouterr().err
