"""The metrics at the moments when clients leave: each request counts once, and nothing waits when nobody does."""

import asyncio
import json
import re
import socket
import threading
import time
from typing import Any

import pytest
from prometheus_client import generate_latest

from quern.generate.engine import Engine
from quern.generate.reply import Generation
from quern.serve.gate import Gate
from quern.serve.metrics import Metrics
from quern.serve.server import create_app
from quern.serve.worker import Job, Limits, Models, Worker
from tests.support.http_server import running, web
from tests.support.load_clients import RESET, post
from tests.support.toy_engine import toy_engine
from tests.support.waiting import until

CHAT = b'{"model": "toy", "messages": [{"role": "user", "content": "?"}], "stream": true}'


class Held(Engine):
    """Takes its second step only when it is let go."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.steps, self.reached, self.go = 0, threading.Event(), threading.Event()

    def step(self, prefill_tokens: int | None = None) -> None:
        super().step(prefill_tokens)
        self.steps += 1
        if self.steps == 2:
            self.reached.set()
            self.go.wait(30)


def test_a_request_that_is_given_up_before_it_begins_does_not_wait_for_ever() -> None:
    engine = toy_engine(context=256)
    held = Held(engine.model, engine.tokenizer, engine.machine)
    with running(create_app({"toy": held})) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address) as first, socket.create_connection(address) as second:
            first.sendall(post("/v1/chat/completions", CHAT))
            assert held.reached.wait(30)
            second.sendall(post("/v1/chat/completions", CHAT))
            assert second.recv(1)  # the head of its stream: it is in line
            for leaving in (first, second):
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        time.sleep(0.3)  # the server sees both leave in the middle of a step
        held.go.set()
        until(lambda: loads(url) == {"running": 0, "waiting": 0}, 4)


def loads(url: str) -> dict[str, float]:
    lines = re.findall(r"quern:num_requests_(\w+)\{.*?\} (\S+)", web.get(f"{url}/metrics").text)
    return {name: float(value) for name, value in lines}


def test_a_client_that_leaves_with_its_last_token_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    count = Metrics.observe

    def leaving(*counted: Any) -> None:
        """The client leaves at this very moment, in the event loop's thread."""
        count(*counted)
        jobs[0].cancel()

    monkeypatch.setattr(Metrics, "observe", leaving)
    models = Models({"toy": (engine := toy_engine())}, Limits())

    async def ask() -> None:
        jobs.append(models.find("toy").submit(lambda: engine.submit([[engine.tokenizer.bos]], max_tokens=1)))
        async for _ in jobs[0].batches():
            pass

    models.start()
    asyncio.run(ask())
    models.stop()
    page = generate_latest(models.metrics.registry).decode()
    counted = re.findall(r'request_success_total\{finished_reason="(\w+)".*\} (\S+)', page)
    assert counted == [("length", "1.0")]


def test_a_request_that_is_given_up_while_it_is_submitted_leaves_the_batch() -> None:
    worker, generation = Worker("toy", toy_engine(), Metrics(), Limits(), lambda: None), Generation(1)

    async def ask() -> None:
        def submit() -> Generation:
            job.cancel()  # the client leaves at this very moment
            return generation

        job = worker.submit(submit)
        assert not job.begin() and generation.cancelled

    asyncio.run(ask())


def test_a_client_that_leaves_in_its_body_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    statuses: list[int] = []
    gate = Gate(log=lambda line: statuses.append(json.loads(line)["status"]))
    whole = post("/v1/chat/completions", CHAT)
    with running(create_app({"toy": toy_engine(context=256)}, gate)) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as leaving:
            leaving.sendall(whole[: len(whole) - 5])
            time.sleep(0.3)
        until(lambda: statuses, 5)
        assert web.get(f"{url}/health").status_code == 200
    assert statuses[0] == 499
    assert "Traceback" not in capfd.readouterr().err
