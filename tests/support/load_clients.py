"""Clients that put a server under load and compare each answer with one that is known before. asyncio, HTTP/1.1.

A client of the closed loop keeps its connection and sends its next request when the last one has ended. Some requests
are given up at any moment, some are no requests, and some clients read slowly. Answers are collected as bytes and
parsed at their end, so that the clients take little of the processor that they share with the server.
"""

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SECONDS = 60.0
"""The longest time that one request may take."""
CANCELLED, MALFORMED, SLOW = 0.10, 0.05, 0.03
"""Shares of the requests. A slow reader asks for the log-probabilities of 20 tokens in each place: some 150 kB."""
IDLE_SECONDS = 3.0
"""A connection whose last request is older is not used again: the server closes it 5 s after its last answer."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with a time of 0: closing the socket sends RST."""


@dataclass(frozen=True)
class Case:
    """A request that is streamed, and its answer: the text, the reason of its end, and its number of tokens."""

    path: str
    body: Mapping[str, Any]
    text: str
    reason: str
    tokens: int

    def wire(self, number: int = 0, **more: Any) -> bytes:
        """The request. A schema gets a title with `number`: the answer is the same, but the schema is another."""
        body = {**self.body, **more}
        if "response_format" in body:
            form = body["response_format"]["json_schema"]
            own = {**form, "schema": {**form["schema"], "title": str(number)}}
            body["response_format"] = {"type": "json_schema", "json_schema": own}
        return post(self.path, json.dumps(body).encode())


def post(path: str, body: bytes, media_type: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {media_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Answer(NamedTuple):
    """The reply of a stream. ended: whether its last event is the one that has to be the last."""

    text: str
    reason: str | None
    tokens: int | None
    ended: bool
    error: str = ""


def read_stream(body: bytes) -> Answer:
    """Reads the events of a chat, a completion or a response."""
    text, reason, tokens, ended, error = "", None, None, False, ""
    for block in body.decode().split("\n\n")[:-1]:
        data = block[block.index("data: ") + 6 :]
        if ended:
            return Answer(text, reason, tokens, False, f"an event after the last one: {data[:200]}")
        if data == "[DONE]":
            ended = True
            continue
        event = json.loads(data)
        kind = event.get("type", "")
        if "error" in event or kind == "error":
            error = json.dumps(event)
        elif kind == "response.output_text.delta":
            text += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            whole = event["response"]
            reason = "stop" if kind == "response.completed" else "length"
            tokens, ended = whole["usage"]["output_tokens"], True
            if text != "".join(part["text"] for item in whole["output"] for part in item["content"]):
                error = "the last event has another text than the pieces"
        elif not kind:
            for choice in event["choices"]:
                text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                reason = choice["finish_reason"] or reason
            tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
    return Answer(text, reason, tokens, ended, error)


def difference(case: Case, status: int, body: bytes) -> str:
    """The fault in the answer to a case; empty for a right one."""
    if status != 200:
        return f"{case.path}: status {status}: {body[:300]!r}"
    answer = read_stream(body)
    right = Answer(case.text, case.reason, case.tokens, True)
    return "" if answer == right else f"{case.path}: {answer} instead of {right} for {json.dumps(case.body)[:300]}"


async def receive_head(reader: asyncio.StreamReader) -> str:
    """Reads the status line and the headers of a response, in lower case."""
    return (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()


async def receive_body(reader: asyncio.StreamReader, head: str) -> tuple[int, bytes]:
    """Reads the rest of a response; returns its status and body. Raises IncompleteReadError for one that is cut off."""
    status = int(head.split()[1])
    if "content-length:" in head:
        return status, await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
    if "transfer-encoding: chunked" not in head:
        return status, await reader.read()
    chunked = await reader.readuntil(b"\r\n0\r\n\r\n")
    parts, at = [], 0
    while size := int(chunked[at : (end := chunked.index(b"\r\n", at))], 16):
        parts.append(chunked[end + 2 : end + 2 + size])
        at = end + 4 + size
    return status, b"".join(parts)


async def receive(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Reads one response; returns its status and body. Raises IncompleteReadError for one that is cut off."""
    return await receive_body(reader, await receive_head(reader))


class Connection:
    """One connection, opened when it is first needed."""

    def __init__(self, port: int, receive_bytes: int = 0) -> None:
        self._port, self._receive_bytes = port, receive_bytes
        self._used = 0.0
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def send(self, data: bytes) -> asyncio.StreamReader:
        if time.monotonic() - self._used > IDLE_SECONDS:
            self.close()
        if self.writer is None or self.reader is None:
            if self._receive_bytes:
                own = socket.socket()
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
                own.setblocking(False)
                await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self._port))
                self.reader, self.writer = await asyncio.open_connection(sock=own, limit=self._receive_bytes)
            else:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        self.writer.write(data)
        self._used = time.monotonic()
        return self.reader

    def close(self, reset: bool = False) -> None:
        if self.writer is not None:
            if reset:
                self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.writer.transport.abort()
            self.reader = self.writer = None


@dataclass
class Totals:
    """The clients' counts."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)  # answers that are not as expected, and requests that failed
    refusals: list[float] = field(default_factory=list)  # seconds until each malformed request was refused


@dataclass
class Load:
    """Clients of one server."""

    port: int
    cases: Sequence[Case]  # from which ordinary requests are drawn
    slow: Case  # the request of slow readers: completions with log-probabilities
    long: Case  # the request that clients give up; it takes longer than anyone waits
    malformed: Sequence[tuple[bytes, int]]  # bytes that are no good request, with the status that is the answer
    seed: int = 0  # of every client's choices
    totals: Totals = field(default_factory=Totals)

    async def run(self, clients: int, seconds: float) -> None:
        """Runs clients until this time has passed; their last requests then come to their ends."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(random.Random(f"{self.seed} {number}"), until))

    async def _client(self, numbers: random.Random, until: float) -> None:
        kept = Connection(self.port)
        while time.monotonic() < until and len(self.totals.wrong) < 20:
            share = numbers.random()
            try:
                async with asyncio.timeout(SECONDS):
                    if (share := share - CANCELLED) < 0:
                        await self._cancel(numbers)
                    elif (share := share - MALFORMED) < 0:
                        await self._send_malformed(numbers)
                    elif share < SLOW:
                        await self._read_slowly(numbers)
                    else:
                        await self._ask(kept, numbers)
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                self.totals.wrong.append(repr(error))
                kept.close()
        kept.close()

    def _check(self, case: Case, status: int, body: bytes) -> None:
        if wrong := difference(case, status, body):
            self.totals.wrong.append(wrong)
        self.totals.tokens += case.tokens

    async def _ask(self, kept: Connection, numbers: random.Random) -> None:
        case = numbers.choice(self.cases)
        self._check(case, *await receive(await kept.send(case.wire(numbers.randrange(200)))))
        self.totals.counts["answered"] += 1

    async def _read_slowly(self, numbers: random.Random) -> None:
        """Reads a part, waits until the server cannot send any more, and reads the rest in small pieces."""
        own, data = Connection(self.port, receive_bytes=4096), b""
        try:
            reader = await own.send(self.slow.wire(logprobs=20))
            while not data.endswith(b"\r\n0\r\n\r\n"):
                if not (piece := await reader.read(4096)):
                    raise EOFError(f"a slow reader's stream was cut off after {len(data)} bytes")
                data += piece
                await asyncio.sleep(numbers.uniform(0.5, 1.5) if len(data) == len(piece) else 0.005)
        finally:
            own.close()
        whole = asyncio.StreamReader(limit=1 << 24)
        whole.feed_data(data)
        whole.feed_eof()
        self._check(self.slow, *await receive(whole))
        self.totals.counts["read slowly"] += 1

    async def _cancel(self, numbers: random.Random) -> None:
        """Gives a request up: in its body, at once, while it waits or in the answer; by RST, or by closing."""
        own, when = Connection(self.port), numbers.choice(("body", "at once", "waiting", "whole", "stream", "stream"))
        wire = self.long.wire(stream=False, stream_options=None) if when == "whole" else self.long.wire()
        reader = await own.send(wire[: len(wire) // 2] if when == "body" else wire)
        if when in ("waiting", "whole"):
            await asyncio.sleep(numbers.uniform(0, 0.1))
        elif when == "stream":
            await reader.readexactly(numbers.randrange(1, 2000))  # of some 5,000 and more
        own.close(reset=numbers.random() < 0.7)
        self.totals.counts["cancelled"] += 1

    async def _send_malformed(self, numbers: random.Random) -> None:
        wire, expected = numbers.choice(self.malformed)
        own, start = Connection(self.port), time.monotonic()
        try:
            status, body = await receive(await own.send(wire))
        finally:
            own.close()
        self.totals.refusals.append(time.monotonic() - start)
        self.totals.counts["malformed"] += 1
        if status != expected:
            self.totals.wrong.append(f"status {status}, not {expected}, for {wire[:300]!r}: {body[:300]!r}")
