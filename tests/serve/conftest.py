"""One server for all tests that only ask it: a small random model, which keeps prefixes."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quern.generate.engine import Engine
from quern.serve.server import create_app
from quern.serve.worker import Limits
from tests.support.http_server import running
from tests.support.toy_engine import toy_engine

NAME, CONTEXT, SEATS = "toy", 512, 32
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO: list[Any] = [{"role": "user", "content": "Grüß dich 👋🏽"}]


@pytest.fixture(scope="session")
def engine() -> Engine:
    return toy_engine(context=CONTEXT)


@pytest.fixture(scope="session")
def url(engine: Engine) -> Iterator[str]:
    served = Engine(engine.model, engine.tokenizer, engine.machine, max_rows=SEATS, prefix_megabytes=8)
    with running(create_app({NAME: served}, limits=Limits(waiting=100))) as base:
        yield base


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
