"""Eight streams beside one attacker of each kind: no gap between two pieces is much longer than without it.

The gap may be 0.1 s longer than the longest one of the same streams alone, and memory stays within 5 %.
`make campaign` measures them and prints the figures.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from tests.serve.test_load import (
    CHAT,
    LONG_TOKENS,
    NO_END,
    RESPONSES,
    TEXT,
    Offline,
    cases,
    growth,
    malformed,
    under_load,
)
from tests.serve.test_server import full
from tests.support.line_server import ROOT
from tests.support.load_clients import Connection, Load, post
from tests.support.serve_process import MODEL, Served, serving
from tests.support.toy_engine import SENTENCES

pytestmark = [pytest.mark.campaign, pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")]
VICTIMS = 8
SECONDS = 6.0
MOST_LONGER = 0.1
BIAS = {str(token): bias for token, bias in NO_END.items()}
WORDS = "the miller grinds the grain at dawn and the stone hums " * 3


def ask(path: str, **body: Any) -> bytes:
    return post(path, json.dumps({"model": MODEL, "logit_bias": BIAS, **body}).encode())


def chat(**more: Any) -> bytes:
    return ask(CHAT, messages=[{"role": "user", "content": "?"}], max_tokens=200, **more)


STRINGS = {f"p{number}": {"type": "string", "minLength": 8} for number in range(10)}
SCHEMA = {"type": "object", "properties": STRINGS, "required": [*STRINGS], "additionalProperties": False}
HEAD = f'{{"model":"{MODEL}",'
ATTACKS: dict[str, list[bytes]] = {
    "headers of 1 MB": [b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (1 << 20)],
    "20,000 headers": [b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 20_000 + b"\r\n"],
    "requests without a body": [b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"],
    "340,000 objects": [post(RESPONSES, full(HEAD + '"input":[', "{}", "]}"))],
    "5,000 objects": [post(RESPONSES, f'{HEAD}"input":[{",".join(["{}"] * 5000)}]}}'.encode())],
    "1,100 messages": [ask(CHAT, messages=[{"role": "user", "content": ""}] * 1100)],
    "4,000 unknown fields": [post(CHAT, (HEAD + ",".join(f'"{n}":1' for n in range(4000)) + "}").encode())],
    "500,000 ids": [post("/detokenize", full(HEAD + '"tokens":[', "7", "]}"))],
    "1 MB to tokenize": [post("/tokenize", json.dumps({"model": MODEL, "prompt": WORDS * 6000}).encode())],
    "echo of 32 prompts": [ask(TEXT, prompt=[WORDS] * 32, max_tokens=0, echo=True, logprobs=20)],
    "an expression of ten stars": [chat(structured_outputs={"regex": ".*.*.*.*.*.*.*.*.*.*=.*"}, n=8)],
    "ten strings": [chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, n=8)],
    "20 log-probabilities": [chat(logprobs=True, top_logprobs=20, n=8)],
    "prompts of the whole context": [ask(TEXT, prompt=WORDS[:150] + str(number), max_tokens=1) for number in range(50)],
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("attacked"), "--prefix-megabytes", "0.5") as server:
        server.wait_for_port(120)
        yield server


async def victim(port: int, number: int, gaps: list[float], stop: asyncio.Event) -> None:
    """Streams one long text after another, and notes the seconds between two pieces."""
    wire = ask(TEXT, prompt=f"{number}: at dawn", max_tokens=220, stream=True, seed=number)
    while not stop.is_set():
        connection = Connection(port)
        reader = await connection.send(wire)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"\n\n")
        before, end = time.perf_counter(), b""
        while not end.endswith(b"0\r\n\r\n"):
            end = (end + await reader.read(1 << 16))[-16:]
            now = time.perf_counter()
            gaps.append(now - before)
            before = now
        connection.close()


@contextmanager
def attacker(port: int, wires: list[bytes], sent: list[int]) -> Iterator[None]:
    """Sends the requests in a row meanwhile, and adds their number to `sent`."""
    with NamedTemporaryFile() as file:
        file.write(pickle.dumps(wires))
        file.flush()
        command = [sys.executable, str(ROOT / "tests/support/attacker.py"), str(port), file.name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            yield
            sent.append(int(process.communicate(timeout=60)[0]))


async def longest_gap(port: int, wires: list[bytes]) -> tuple[float, int]:
    """The longest gap of all victims, and how many requests the attacker has sent."""
    gaps: list[float] = []
    sent: list[int] = []
    stop = asyncio.Event()
    tasks = [asyncio.create_task(victim(port, number, gaps, stop)) for number in range(VICTIMS)]
    await asyncio.sleep(0.5)
    gaps.clear()
    with attacker(port, wires, sent) if wires else nullcontext():
        await asyncio.sleep(SECONDS)
        longest = max(gaps)
    stop.set()
    await asyncio.gather(*tasks)
    return longest, sum(sent)


@pytest.mark.parametrize("kind", ATTACKS)
def test_streams_go_on_beside_an_attacker(served: Served, kind: str) -> None:
    ordinary, _ = asyncio.run(longest_gap(served.port, []))
    before = served.resident_bytes()
    attacked, sent = asyncio.run(longest_gap(served.port, ATTACKS[kind]))
    again, _ = asyncio.run(longest_gap(served.port, []))
    grown = served.resident_bytes() / before - 1
    print(f"{kind}: {sent} sent; gap {attacked:.3f} s, without {ordinary:.3f} and {again:.3f} s; memory {grown:+.1%}")
    assert sent > 0 and attacked <= max(ordinary, again) + MOST_LONGER
    assert grown <= 0.05


@pytest.mark.timeout(900)
def test_ten_minutes_of_load_beside_an_attacker_of_each_kind(served: Served, seconds: float = 600) -> None:
    """64 clients: no answer is wrong, and no stream is cut off."""
    offline = Offline()
    slow = offline.text(SENTENCES[3], 40, {"temperature": 0})
    long = offline.text("?", LONG_TOKENS, {"temperature": 0})
    load = Load(served.port, cases(offline), slow, long, malformed())

    async def run() -> tuple[list[tuple[float, int]], list[int]]:
        sent: list[int] = []
        every = [wire for wires in ATTACKS.values() for wire in wires[:1]]
        with attacker(served.port, every, sent):
            return await under_load(load, served, seconds), sent

    memory, sent = asyncio.run(run())
    grown = growth(memory, seconds / 3)  # every kind of attack has then had its memory
    print(f"{dict(load.totals.counts)} in {seconds:g} s, {sum(sent)} attacks, memory {grown:+.1%}")
    assert not load.totals.wrong, load.totals.wrong[:3]
    assert load.totals.counts["answered"] > 0 and sum(sent) >= len(ATTACKS) and abs(grown) <= 0.05
