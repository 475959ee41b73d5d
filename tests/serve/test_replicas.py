"""`quern serve --replicas 2` as a program: whole answers, one port's rates and metrics, a killed replica, SIGTERM.

Answers are compared with those of an engine alone (as in test_load.py), whichever replica gives them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quern.generate.engine import Engine
from quern.generate.sample import Sampling
from quern.serve.replicas.processes import Replica
from quern.serve.replicas.router import Router, merge, opening
from quern.text.chat import render_prompt
from tests.support.llama_run import FP32, model_of
from tests.support.serve_process import MODEL, Served, serving, small_recipe
from tests.support.toy_engine import SENTENCES, toy_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
NO_END = {token: -100.0 for token in toy_tokenizer().special_ids.values()}
LONG, CHOICES, MANY = 200, 8, 12
"""Tokens and choices of an answer, and answers, of which half are more rows than a replica has seats."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("replicas"), "--replicas", "2") as server:
        server.wait_for_port(240)
        yield server


def replicas(served: Served) -> list[int]:
    """Process ids of the replicas."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(status[1]) == served.pid and b"quern.serve.replicas.process" in command:
            found.append(int(folder.name))
    return sorted(found)


def body(said: str, most: int = 20, **more: Any) -> dict[str, Any]:
    bias = {str(token): value for token, value in NO_END.items()}
    messages = [{"role": "user", "content": said}]
    return {"model": MODEL, "messages": messages, "max_tokens": most, "temperature": 0, "logit_bias": bias, **more}


def ask(served: Served, said: str, most: int = 20, **more: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{served.port}/v1/chat/completions"
    return httpx.post(url, json=body(said, most, **more), timeout=60, verify=False)


def streamed(text: str) -> list[str]:
    """The text of each choice."""
    lines = [line[6:] for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    texts: dict[int, str] = defaultdict(str)
    for line in lines[:-1]:
        choice = json.loads(line)["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    return [texts[index] for index in sorted(texts)]


def alone(said: str, most: int = 20) -> str:
    engine = Engine(model_of(small_recipe()), toy_tokenizer(), FP32)
    prompt = render_prompt(engine.tokenizer, [{"role": "user", "content": said}])
    return engine.generate([prompt], max_tokens=most, sampling=Sampling(0), bias=NO_END)[0][0].text


def samples(served: Served, name: str) -> dict[str, float]:
    """A metric's values by the number of the replica."""
    page = httpx.get(f"http://127.0.0.1:{served.port}/metrics", timeout=30, verify=False).text
    return {number: float(value) for number, value in re.findall(rf'^{name}{{replica="(\d)".*}} (\S+)$', page, re.M)}


@contextmanager
def streams(served: Served, said: Sequence[str]) -> Iterator[list[Future[str]]]:
    """Streams of long answers, after the head of each has arrived; the last of them wait for seats."""
    begun = threading.Semaphore(0)
    url = f"http://127.0.0.1:{served.port}/v1/chat/completions"

    def read(one: str) -> str:
        asking = body(one, LONG, stream=True, n=CHOICES)
        with httpx.stream("POST", url, json=asking, timeout=100, verify=False) as response:
            begun.release()
            return response.read().decode()

    with ThreadPoolExecutor(len(said)) as pool:
        futures = [pool.submit(read, one) for one in said]
        assert all(begun.acquire(timeout=60) for _ in said)
        yield futures


def test_both_replicas_answer_and_a_conversation_stays_with_one(served: Served) -> None:
    said = [f"{sentence} {number}" for number in range(3) for sentence in SENTENCES]
    expected = [alone(one) for one in said]
    with ThreadPoolExecutor(12) as pool:
        whole = list(pool.map(lambda one: ask(served, one), said))
        pieces = list(pool.map(lambda one: ask(served, one, stream=True), said))
    assert [one.json()["choices"][0]["message"]["content"] for one in whole] == expected
    assert [streamed(one.text) for one in pieces] == [[one] for one in expected]
    assert all(len(one.headers.get_list("x-request-id")) == 1 for one in (*whole, *pieces))
    counted = samples(served, "quern:e2e_request_latency_seconds_count")
    assert set(counted) == {"0", "1"} and sum(counted.values()) == 24 and min(counted.values()) > 0
    # Each prompt was asked twice, and the second time it was known.
    assert all('"cached_tokens": 0' not in ask(served, one).text for one in said[:4])


def test_what_a_replica_refuses_is_refused_and_pages_are_whole(served: Served) -> None:
    address = f"http://127.0.0.1:{served.port}"
    assert ask(served, "?", n=0).json()["error"]["param"] == "n"
    assert httpx.get(f"{address}/nothing").status_code == 404
    assert httpx.post(f"{address}/tokenize", content=b" " * (2 << 20)).status_code == 413
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == MODEL
    assert "text/html" in httpx.get(address).headers["content-type"]
    assert httpx.get(f"{address}/health").json() == {"status": "ok", "replicas": 2, "ready": 2}
    responses = {"model": MODEL, "input": "?", "max_output_tokens": 4, "stream": True}
    events = httpx.post(f"{address}/v1/responses", json=responses, timeout=60).text
    assert "response.completed" in events or "response.incomplete" in events
    assert "error" not in re.findall(r"^event: (\S+)", events, re.M)


def test_a_killed_replica_is_started_again_and_the_other_one_answers(served: Served) -> None:
    before = replicas(served)
    assert len(before) == 2
    expected = alone(SENTENCES[0])
    with streams(served, [f"{number}?" for number in range(MANY)]) as open_ones:
        os.kill(before[0], signal.SIGKILL)
        texts = [one.result() for one in open_ones]
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    lost = [text for text in texts if '"error"' in text]
    assert 0 < len(lost) < MANY and all("replica that wrote this reply stopped" in text for text in lost)
    for _ in range(6):
        assert ask(served, SENTENCES[0]).json()["choices"][0]["message"]["content"] == expected
    deadline = time.monotonic() + 120
    while httpx.get(f"http://127.0.0.1:{served.port}/health").json()["ready"] < 2:
        assert time.monotonic() < deadline, served.log()
        time.sleep(0.1)
    after = replicas(served)
    assert len(after) == 2 and before[0] not in after and before[1] in after
    assert "it is started again" in served.log()
    assert ask(served, SENTENCES[0]).json()["choices"][0]["message"]["content"] == expected


def test_sigterm_lets_the_streams_of_both_end(served: Served) -> None:
    """The last test: it stops the server."""
    expected = [[alone(f"{number}!", LONG)] * CHOICES for number in range(MANY)]
    with streams(served, [f"{number}!" for number in range(MANY)]) as open_ones:
        served.terminate()
        assert not all(one.done() for one in open_ones), "the streams ended too soon to prove anything"
        assert [streamed(one.result()) for one in open_ones] == expected
    assert served.process.wait(60) == 0
    assert not served.left() and "Traceback" not in served.log(), served.log()


def test_a_run_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "out/runs/first/rl/checkpoints/step-00000001").mkdir(parents=True)  # damaged
    with serving(tmp_path, "--replicas", "2", "--stage", "rl") as server:
        assert server.process.wait(120) == 1
        assert "replica" in server.log() and "Traceback" not in server.log(), server.log()


def test_the_least_busy_replica_is_chosen_unless_another_one_knows_the_beginning() -> None:
    both = [Replica(number, Path(str(number)), ready=True) for number in range(2)]
    router = Router(both)
    chat = opening(json.dumps(body("Hello")).encode())
    longer = json.dumps(
        body("Hello") | {"messages": [*body("Hello")["messages"], {"role": "assistant", "content": "!"}]}
    )
    assert chat == opening(longer.encode()) != opening(json.dumps(body("Hello?")).encode())
    assert opening(b"[]") is opening(b"{") is opening(b"{}") is None
    assert router.choose(chat) is both[0]
    both[0].open = 3
    assert router.choose(chat) is both[0] and router.choose(None) is both[1]
    both[0].open = 30
    assert router.choose(chat) is both[1]
    both[1].ready = False
    assert router.choose(chat) is both[0]


def test_metrics_of_one_name_stand_together() -> None:
    page = '# HELP a_total A.\n# TYPE a_total counter\na_total{model_name="m"} 1.0\n# HELP b B.\nb{x="y"} 2.0\n'
    assert merge({0: page, 1: page}).splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{replica="0",model_name="m"} 1.0',
        'a_total{replica="1",model_name="m"} 1.0',
        "# HELP b B.",
        'b{replica="0",x="y"} 2.0',
        'b{replica="1",x="y"} 2.0',
    ]
