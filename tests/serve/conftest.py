"""One server for all tests that only ask it: a small random model, which keeps prefixes; and requests to a server."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quern.generate.engine import Engine
from quern.serve.server import create_app
from tests.support.http_server import running, web
from tests.support.toy_engine import toy_engine, toy_tokenizer

NAME, CONTEXT, SEATS = "toy", 512, 32
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO: list[Any] = [{"role": "user", "content": "Grüß dich 👋🏽"}]
FIRST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "?"}]},
    TEXT: {"prompt": "?"},
    RESPONSES: {"input": "?"},
}
"""The least fields of a request to a path."""
NO_END = {token: -100.0 for token in toy_tokenizer().special_ids.values()}
"""Bias of a reply that ends at max_tokens only, for an engine and, as JSON, for a server."""


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def post(url: str, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
    """Posts bytes, or the least request with these fields."""
    content = body if isinstance(body, bytes) else json.dumps({"model": NAME, **FIRST.get(path, {}), **body})
    return web.post(url + path, content=content, headers={"content-type": "application/json", **headers})


def check_error(response: httpx.Response, status: int, words: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert words in error["message"] and error["param"] == param, error


@pytest.fixture(scope="session")
def engine() -> Engine:
    return toy_engine(context=CONTEXT)


@pytest.fixture(scope="session")
def url(engine: Engine) -> Iterator[str]:
    served = Engine(engine.model, engine.tokenizer, engine.machine, max_rows=SEATS, prefix_megabytes=8)
    with running(create_app({NAME: served})) as base:
        yield base


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
