"""A load generator for OpenAI-compatible servers: clients that stream completions, and when each piece arrived.

A client of a closed loop sends its next request when the last one has ended; in an open loop, requests are sent at
random times (Poisson), however many are open. Token ids are sent, so the server's tokenizer plays no part. Run as
`python -m quern.serve.load`, with the settings of `Load` as JSON on standard input, it writes one JSON line for
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
    """What is sent. seconds: no request starts later; rate: requests a second of the open loop, 0 for a closed one.

    long_tokens: Client 0 of a closed loop sends prompts of this length; 0 for prompts like the others'.
    """

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
    prompt_tokens: int
    start: float
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


async def request(load: Load, client: int, prompt: list[int], origin: float, seed: int) -> Sent:
    """Streams one completion over a connection of its own."""
    sent = Sent(client, len(prompt), time.perf_counter() - origin)
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
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
        try:
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ConnectionError(status.decode().strip())
            done = False
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    break
                _take(sent, line, time.perf_counter() - origin)
            if not done and not sent.error:
                raise ConnectionError("the stream ended without [DONE]")
        finally:
            writer.close()
    except (OSError, ValueError) as error:
        sent.error = sent.error or str(error)
    sent.end = time.perf_counter() - origin
    return sent


def _take(sent: Sent, line: bytes, now: float) -> None:
    """Takes one event. A piece is told from the others by its text, without parsing every one of thousands a second."""
    if b'"choices": []' in line:
        usage = json.loads(line[6:])["usage"]
        sent.tokens = usage["completion_tokens"]
        sent.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    elif b'"error"' in line:
        sent.error = json.loads(line[6:])["error"]["message"]
    elif b'"text": ""' not in line and (not sent.arrivals or now > sent.arrivals[-1]):
        sent.arrivals.append(now)


async def run(load: Load) -> list[Sent]:
    """All requests, in the order of their ends."""
    numbers = random.Random(load.seed)
    origin = time.perf_counter()
    done: list[Sent] = []

    def prompt(tokens: int) -> list[int]:
        return [load.bos, *(numbers.randrange(load.vocab_size) for _ in range(tokens - 1))]

    async def closed(client: int) -> None:
        while time.perf_counter() - origin < load.seconds:
            length = load.long_tokens if client == 0 and load.long_tokens else load.prompt_tokens
            done.append(await request(load, client, prompt(length), origin, numbers.getrandbits(40)))

    async def one(client: int) -> None:
        done.append(await request(load, client, prompt(load.prompt_tokens), origin, numbers.getrandbits(40)))

    if not load.rate:
        await asyncio.gather(*(closed(client) for client in range(load.clients)))
        return done
    tasks, at = [], 0.0
    while (at := at + numbers.expovariate(load.rate)) < load.seconds:
        await asyncio.sleep(max(0.0, origin + at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(len(tasks))))
    await asyncio.gather(*tasks)
    return done


if __name__ == "__main__":
    for one in asyncio.run(run(Load(**json.loads(sys.stdin.read())))):
        print(json.dumps(asdict(one)))
