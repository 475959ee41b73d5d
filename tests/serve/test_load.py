"""`quern serve` under load, as a program: 64 clients that stream, give up, send nonsense and read slowly.

Each answer is the one that its request gets alone, no stream is cut off, memory is flat, the metrics are the clients'
counts, no seat stays taken, and SIGTERM lets every stream that was accepted end. The suite has 6 seconds of load;
`make campaign` has 600.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.serve.routes import MAX_BODY_BYTES
from tests.serve.conftest import CHAT, NO_END, RESPONSES, TEXT
from tests.support.http_server import counters
from tests.support.load_clients import (
    Case,
    Connection,
    Load,
    Totals,
    difference,
    post,
    read_stream,
    receive,
    receive_body,
    receive_head,
)
from tests.support.serve_process import MODEL, Served, serving
from tests.support.toy_engine import SENTENCES
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and children are read from /proc")
CLIENTS = 64
SEATS = 32
LONG_TOKENS = 120
"""Tokens of a reply that is given up, and of one that SIGTERM must not cut off."""
SYSTEM = "You are a miller. Answer in one sentence, and name the price of the grain first."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def chat(said: str, most: int, schema: bool = False, **sampled: Any) -> Case:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}}
    body = {"messages": messages, "max_tokens": most, **USAGE, **(form if schema else {}), **sampled}
    return Case(CHAT, {"model": MODEL, **body}, "", "", 0)


def text(said: str, most: int, **sampled: Any) -> Case:
    body = {"prompt": said, "max_tokens": most, **USAGE, "logit_bias": NO_END, "temperature": 0}
    return Case(TEXT, {"model": MODEL, **body, **sampled}, "", "", 0)


def cases() -> list[Case]:
    """Greedy and seeded requests of every kind; some prompts are long, many begin alike."""
    made = []
    for number, said in enumerate((*SENTENCES, SENTENCES[0] + " " + SENTENCES[1], "Why?", "Grüß dich 👋🏽")):
        seeded: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": 100 + number}
        response = {"model": MODEL, "input": said, "max_output_tokens": 12 + 3 * number, "stream": True}
        made += [
            chat(said, 20 + 4 * number, temperature=0),
            chat(said, 24, logit_bias=NO_END, **seeded),
            chat(said, 48, schema=True, **seeded | {"seed": number}),
            text(said, 30),
            text(said, 16 + number, min_p=0.01, **seeded),
            Case(RESPONSES, {**response, "temperature": 0}, "", "", 0),
        ]
    clock = text("At ", 12, structured_outputs={"regex": "[0-9]{2}:[0-9]{2}"}, logit_bias={})
    return [*made, chat(SENTENCES[2], 48, schema=True, temperature=0), clock]


def malformed() -> list[tuple[bytes, int]]:
    def chat(**more: Any) -> bytes:
        return post(CHAT, json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "?"}], **more}).encode())

    return [
        (b"NONSENSE\r\n\r\n", 400),
        (post(CHAT, b'{"model": '), 400),
        (post(CHAT, b" " * (MAX_BODY_BYTES + 1)), 413),
        (post(CHAT, b"{}", media_type="text/plain"), 415),
        (post("/v1/nothing", b"{}"), 404),
        (chat(model="gpt-4"), 404),
        (chat(temperature="hot"), 400),
        (chat(stream=True, messages=[{"role": "user", "content": "long " * 400}]), 400),
        (chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}}), 400),
    ]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    # Few megabytes for prompts: their states leave all the time.
    with serving(tmp_path, "--prefix-megabytes", "0.5") as server:
        yield server


async def under_load(load: Load, served: Served, seconds: float) -> list[tuple[float, int]]:
    """Runs the clients; returns the server's resident bytes twice a second."""
    memory, start = [], time.monotonic()

    async def watch() -> None:
        while True:
            memory.append((time.monotonic() - start, served.resident_bytes()))
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    await load.run(CLIENTS, seconds)
    watching.cancel()
    return memory


def growth(memory: Sequence[tuple[float, int]], warm_up: float) -> float:
    """The last two seconds' mean memory over that of the two seconds after the warm-up, less 1."""
    end = memory[-1][0]
    first = [size for at, size in memory if warm_up <= at <= warm_up + 2]
    last = [size for at, size in memory if at >= end - 2]
    return sum(last) / len(last) / (sum(first) / len(first)) - 1


def check_counts(totals: Totals, found: dict[str, float], long: Case) -> None:
    """The server's counters are the clients' counts; of what was given up, some was finished before."""
    answered = totals.counts["answered"] + totals.counts["read slowly"]
    finished = sum(found.get(f"request_success_total {reason}", 0) for reason in ("stop", "length", "tool_calls"))
    aborted = found.get("request_success_total abort", 0)
    assert answered <= finished and finished + aborted <= answered + totals.counts["cancelled"]
    assert found["e2e_request_latency_seconds_count"] == finished + aborted
    assert found["generation_tokens_total"] == totals.tokens + (finished - answered) * long.tokens
    # What is given up leaves at once: only a few of these have got all of their tokens before.
    assert finished - answered <= 0.25 * totals.counts["cancelled"] and aborted > 0


async def drain(served: Served, cases: Sequence[Case]) -> None:
    """SIGTERM while more requests are open than there are seats: each is answered, and no other one is accepted."""
    connections = [Connection(served.port) for _ in cases]
    try:
        readers = [await one.send(case.wire()) for one, case in zip(connections, cases, strict=True)]
        heads = [await receive_head(reader) for reader in readers]
        served.terminate()
        rests = [asyncio.create_task(receive_body(*one)) for one in zip(readers, heads, strict=True)]
        while not await asyncio.to_thread(served.refuses):
            assert not all(rest.done() for rest in rests), "new connections were accepted to the end"
            await asyncio.sleep(0.02)
        assert not any(rest.done() for rest in rests[SEATS:]), "the streams ended too soon to prove anything"
        for case, rest in zip(cases, await asyncio.gather(*rests), strict=True):
            assert not difference(case, *rest)
    finally:
        for one in connections:
            one.close()


async def alone(served: Served, cases: Sequence[Case]) -> list[Case]:
    """The cases with the answers that the server gives to each of them alone."""
    own, answered = Connection(served.port), []
    for case in cases:
        status, body = await receive(await own.send(case.wire()))
        answer = read_stream(body)
        assert status == 200 and answer.ended and not answer.error and answer.reason and answer.tokens, body[:300]
        answered.append(replace(case, text=answer.text, reason=answer.reason, tokens=answer.tokens))
    own.close()
    assert sum(bool(case.text) for case in answered) > 0.8 * len(cases), answered
    return answered


def idle(found: dict[str, float]) -> bool:
    return found["num_requests_running"] == found["num_requests_waiting"] == found["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize(
    ("seconds", "warm_up"), [(6, 2), pytest.param(600, 60, marks=[pytest.mark.campaign, pytest.mark.timeout(900)])]
)
def test_load(served: Served, seconds: float, warm_up: float) -> None:
    served.wait_for_port(120)
    slow, long, *ordinary = asyncio.run(alone(served, [text(SENTENCES[3], 40), text("?", LONG_TOKENS), *cases()]))
    files, threads = served.files(), served.threads()
    before = counters(served.url)
    load = Load(served.port, ordinary, slow, long, malformed())
    memory = asyncio.run(under_load(load, served, seconds))
    totals = load.totals
    told = f"{len(totals.wrong)} wrong, of {totals.counts}: {totals.wrong[:3]}; {served.log()[-3000:]}"
    assert not totals.wrong, told
    quiet = until(lambda: idle(counters(served.url)), 1)
    until(lambda: served.files() <= files, 1)
    after = counters(served.url)
    check_counts(totals, {name: value - before.get(name, 0) for name, value in after.items()}, long)
    assert min(totals.counts[kind] for kind in ("answered", "cancelled", "malformed", "read slowly")) > 0
    grown, late = growth(memory, warm_up), max(totals.refusals)
    figures = (
        f"{dict(totals.counts)}, {totals.tokens} tokens in {seconds:g} s; memory {memory[-1][1] / 1e6:.0f} MB, "
        f"{grown:+.2%} after {warm_up:g} s; threads {threads} → {served.threads()}; seats free after {quiet:.2f} s; "
        f"slowest refusal {late:.2f} s"
    )
    print(figures)
    assert abs(grown) <= 0.05, figures
    assert late <= 5, figures
    asyncio.run(drain(served, [long] * (SEATS + 16)))
    assert served.process.wait(40) == 0
    assert not served.left()
    assert "Traceback" not in served.log() and "ERROR" not in served.log(), served.log()[-3000:]


def test_a_wrong_stream_is_noticed() -> None:
    """A lost, doubled or exchanged piece, a missing end, an error, a wrong count: none passes for the right answer."""
    case = Case(TEXT, {}, "abc", "length", 3)
    pieces = [{"choices": [{"text": text, "finish_reason": None}], "usage": None} for text in "abc"]
    end = {"choices": [{"text": "", "finish_reason": "length"}], "usage": None}
    usage = {"choices": [], "usage": {"completion_tokens": 3}}

    def body(*events: object) -> bytes:
        return "".join(f"data: {event if event == '[DONE]' else json.dumps(event)}\n\n" for event in events).encode()

    right = [*pieces, end, usage, "[DONE]"]
    assert not difference(case, 200, body(*right))
    assert difference(case, 503, body(*right))
    for at in range(len(right)):
        assert difference(case, 200, body(*right[:at], *right[at + 1 :])), f"event {at} is missing"
        assert at in (3, 4) or difference(case, 200, body(*right[: at + 1], *right[at:])), f"event {at} is doubled"
    assert difference(case, 200, body(pieces[1], pieces[0], *right[2:]))
    assert difference(case, 200, body(*pieces, {"error": {"message": "failed"}}, "[DONE]"))
    assert difference(case, 200, body(*right, end))
