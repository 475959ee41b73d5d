"""A load generator for OpenAI-compatible servers: clients that stream completions, and when each piece arrived.

A client of a closed loop sends its next request when the last one has ended; in an open loop, requests are sent at
random times (Poisson), however many are open. Token ids are sent, so the server's tokenizer plays no part. Run as
`python -m quern.bench.load`, with the settings of `Load` as JSON on standard input, it writes one JSON line for
each request.

Terms: TTFT, the time from sending a request to its first text; ITL, a gap between two pieces of text.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Load:
    """Requests to send. seconds: no request starts later; rate: requests a second of the open loop, 0 for a closed one;
    long_tokens: prompts of client 0 of a closed loop, 0 for the others' length."""

    port: int
    model: str
    vocab_size: int
    bos: int
    clients: int = 32
    seconds: float = 10.0
    prompt_tokens: int = 64
    reply_tokens: int = 128
    seed: int = 0
    rate: float = 0.0
    long_tokens: int = 0


@dataclass
class Sent:
    """One request. Times are seconds since the first request was sent."""

    client: int
    start: float
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    tokens: int = 0
    error: str = ""


Arrived = list[tuple[float, bytes]]
"""Bytes as they arrived and when. They are read later: clients must cost little."""


async def request(load: Load, client: int, prompt: list[int], origin: float, seed: int) -> tuple[Sent, Arrived]:
    """Streams one completion. `read` completes what is returned."""
    sent = Sent(client, time.perf_counter() - origin)
    body = json.dumps(
        {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": load.reply_tokens,
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    arrived: Arrived = []
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
        writer.write(head.encode() + body)
        while data := await reader.read(1 << 16):
            arrived.append((time.perf_counter(), data))
        writer.close()
    except OSError as error:
        sent.error = str(error)
    sent.end = time.perf_counter() - origin
    return sent, arrived


def read(sent: Sent, arrived: Arrived, origin: float) -> None:
    """Fills in what a response said, and when each piece of text arrived."""
    status, done, rest = b"", False, b""
    for at, data in arrived:
        *lines, rest = (rest + data).split(b"\n")
        status = status or (lines[0] if lines else b"")
        for line in lines:
            done |= line.startswith(b"data: [DONE]")
            if done or not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                sent.error = event["error"]["message"]
            elif not event["choices"]:
                sent.tokens = event["usage"]["completion_tokens"]
            elif event["choices"][0]["text"]:
                sent.arrivals.append(at - origin)
    if not sent.error and b" 200 " not in status:
        sent.error = status.decode(errors="replace").strip() or "there was no answer"
    elif not sent.error and not done:
        sent.error = "the stream ended without [DONE]"


async def run(load: Load) -> list[Sent]:
    """All requests, in the order of their ends."""
    numbers = random.Random(load.seed)
    origin = time.perf_counter()
    done: list[tuple[Sent, Arrived]] = []

    async def one(client: int, length: int = load.prompt_tokens) -> None:
        prompt = [load.bos, *(numbers.randrange(load.vocab_size) for _ in range(length - 1))]
        done.append(await request(load, client, prompt, origin, numbers.getrandbits(40)))

    async def closed(client: int) -> None:
        while time.perf_counter() - origin < load.seconds:
            await one(client, load.long_tokens if client == 0 and load.long_tokens else load.prompt_tokens)

    tasks, at = [], 0.0
    if not load.rate:
        tasks = [asyncio.create_task(closed(client)) for client in range(load.clients)]
    while load.rate and (at := at + numbers.expovariate(load.rate)) < load.seconds:
        await asyncio.sleep(max(0.0, origin + at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(len(tasks))))
    await asyncio.gather(*tasks)
    for sent, arrived in done:
        read(sent, arrived, origin)
    return [sent for sent, _ in done]


if __name__ == "__main__":
    for one in asyncio.run(run(Load(**json.loads(sys.stdin.read())))):
        print(json.dumps(asdict(one)))
