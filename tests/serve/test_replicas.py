"""`quern serve --replicas 2` as a program: whole answers, metrics of each replica, a killed replica, SIGTERM.

Answers are compared with those of an engine alone, whichever replica gives them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.serve import replicas
from quern.serve.server import listen
from quern.text.chat import render_prompt
from tests.serve.conftest import CHAT, NO_END, post
from tests.support.exported import FP32, model_of
from tests.support.http_server import counters, web
from tests.support.serve_process import MODEL, Served, serving, small_recipe
from tests.support.toy_engine import SENTENCES, toy_tokenizer
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="--replicas needs Linux")
LONG, CHOICES, MANY = 120, 8, 15
"""Tokens and choices of an answer, and answers: a replica has seats for 32 choices."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("replicas"), "--replicas", "2") as server:
        server.wait_for_port(240)
        yield server


def own_ports(served: Served) -> dict[int, int]:
    """The port of each replica alone, by its number: the last that it told."""
    lines = re.findall(r"^replica (\d): serving .* at http://127\.0\.0\.1:(\d+)$", served.log(), re.M)
    return {int(number): int(port) for number, port in lines}


def processes(served: Served) -> dict[int, int]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes()
        except OSError:
            continue
        if parent == served.pid and (place := re.search(rb"\b%s=(\d)" % replicas.PLACE.encode(), variables)):
            found[int(place[1])] = int(folder.name)
    return found


def body(said: str, most: int = 20, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": said}]
    return {"model": MODEL, "messages": messages, "max_tokens": most, "temperature": 0, "logit_bias": NO_END, **more}


def ask(served: Served, said: str, most: int = 20, **more: Any) -> httpx.Response:
    return post(served.url, CHAT, body(said, most, **more))


def streamed(text: str) -> list[str]:
    """The text of each choice."""
    lines = [line[6:] for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    texts: dict[int, str] = defaultdict(str)
    for line in lines[:-1]:
        choice = json.loads(line)["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    return [texts[index] for index in sorted(texts)]


def alone(said: Sequence[str], most: int = 20) -> list[str]:
    engine = Engine(model_of(small_recipe()), toy_tokenizer(), FP32)
    prompts = [render_prompt(engine.tokenizer, [{"role": "user", "content": one}]) for one in said]
    return [one.text for (one,) in engine.generate(prompts, max_tokens=most, sampling=Sampling(0), bias=NO_END)]


def finished(served: Served) -> list[float]:
    """The requests that each replica has finished, of its own metrics."""
    ports = [port for _, port in sorted(own_ports(served).items())]
    return [counters(f"http://127.0.0.1:{port}").get("e2e_request_latency_seconds_count", 0) for port in ports]


@contextmanager
def streams(served: Served, said: Sequence[str]) -> Iterator[list[Future[str]]]:
    """Streams of long answers, a third at each port, after the head of each has arrived; some wait for seats."""
    begun = threading.Semaphore(0)
    ports = [served.port, *own_ports(served).values()]

    def read(one: str, port: int) -> str:
        url, asking = f"http://127.0.0.1:{port}/v1/chat/completions", body(one, LONG, stream=True, n=CHOICES)
        text = ""
        with suppress(httpx.RemoteProtocolError), web.stream("POST", url, json=asking, timeout=100) as response:
            begun.release()
            for piece in response.iter_text():
                text += piece
        return text

    with ThreadPoolExecutor(len(said)) as pool:
        futures = [pool.submit(read, one, ports[at % len(ports)]) for at, one in enumerate(said)]
        assert all(begun.acquire(timeout=60) for _ in said)
        yield futures


def test_both_replicas_answer_at_one_port(served: Served) -> None:
    said = [f"{sentence} {number}" for number in range(3) for sentence in SENTENCES]
    expected = alone(said)
    with ThreadPoolExecutor(12) as pool:
        whole = list(pool.map(lambda one: ask(served, one), said))
        pieces = list(pool.map(lambda one: ask(served, one, stream=True), said))
    assert [one.json()["choices"][0]["message"]["content"] for one in whole] == expected
    assert [streamed(one.text) for one in pieces] == [[one] for one in expected]
    counted = finished(served)
    assert sum(counted) == 24 and min(counted) > 0  # all at one replica: once in 2 ** 23 times
    with pytest.raises(OSError, match="choose another --port"):
        listen("127.0.0.1", served.port)


def test_a_killed_replica_is_started_again_and_the_other_one_answers(served: Served) -> None:
    before, ports = processes(served), own_ports(served)
    assert set(before) == set(ports) == {0, 1}
    (expected,) = alone(SENTENCES[:1])
    with streams(served, [f"{number}?" for number in range(MANY)]) as open_ones:
        os.kill(before[0], signal.SIGKILL)
        texts = [one.result() for one in open_ones]
    whole = [text for text in texts if text.endswith("data: [DONE]\n\n")]
    assert MANY // 3 <= len(whole) <= MANY - MANY // 3 and not any('"error"' in text for text in texts)
    for _ in range(6):
        assert ask(served, SENTENCES[0]).json()["choices"][0]["message"]["content"] == expected
    assert "replica 0 ended with code -9; it is started again" in served.log()
    until(lambda: own_ports(served) != ports, 120)
    after = processes(served)
    assert after[0] != before[0] and after[1] == before[1]
    assert web.get(f"http://127.0.0.1:{own_ports(served)[0]}/health").json() == {"status": "ok"}


def test_sigterm_lets_the_streams_of_both_end(served: Served) -> None:
    """The last test: it stops the server."""
    said = [f"{number}!" for number in range(MANY)]
    expected = [[text] * CHOICES for text in alone(said, LONG)]
    children = processes(served).values()
    with streams(served, said) as open_ones:
        served.terminate()
        assert not all(one.done() for one in open_ones), "the streams ended too soon to prove anything"
        assert [streamed(one.result()) for one in open_ones] == expected
    assert served.process.wait(60) == 0 and served.refuses()
    listen("127.0.0.1", served.port).close()  # also while its closed connections are remembered (TIME_WAIT)
    assert not any(Path(f"/proc/{one}").exists() for one in children)
    assert not served.left() and "Traceback" not in served.log(), served.log()


def test_a_replica_that_ends_before_it_is_ready_stops_the_start() -> None:
    with pytest.raises(RuntimeError, match=r"replica \d did not start: it ended with code 3"):
        replicas.run([sys.executable, "-S", "-c", "raise SystemExit(3)"], 2, "http", "127.0.0.1", 0, FP32, print)


def test_the_address_of_replicas_with_https_opens_in_a_browser() -> None:
    script = "import os, socket; link = socket.socket(fileno=int(os.environ['QUERN_REPLICA'].split()[-1]))"
    command, lines = [sys.executable, "-S", "-c", f"{script}; link.send(b'.'); link.recv(1)"], list[str]()

    def log(line: str) -> None:
        lines.append(line)
        if "serving" in line:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        replicas.run(command, 2, "https", "127.0.0.1", 0, FP32, log)
    assert re.fullmatch(r"serving with 2 replicas at https://127\.0\.0\.1:\d+", lines[-1])


def test_a_port_of_one_replica_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:({port}|{port - 1}) .*: choose another --port"):
            replicas.run([], 2, "http", "127.0.0.1", port - 2, FP32, print)
