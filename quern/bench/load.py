"""A load generator for OpenAI-compatible servers: clients that stream replies, and when each piece of text arrived.

A client of a closed loop sends its next request when the last one has ended; in an open loop, requests are sent at
random times (Poisson), up to 256 of them open. Token ids are sent, so the server's tokenizer plays no part.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

MOST_OPEN = 256  # requests of an open loop that are sent at the same time; more of them wait


@dataclass(frozen=True)
class Load:
    """Requests to send. seconds: none is due later; rate: requests a second of the open loop, 0 for a closed one;
    long_tokens: prompts of client 0 of a closed loop, 0 for the others' length."""

    port: int
    model: str
    vocab_size: int
    bos: int
    clients: int
    seconds: float
    prompt_tokens: int
    reply_tokens: int
    seed: int
    rate: float = 0.0
    long_tokens: int = 0


@dataclass
class Reply:
    """A streamed reply. start, arrivals: seconds on `time.perf_counter` of the request and of each piece of text."""

    start: float
    client: int = 0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def post(port: int, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()


def stream(port: int, path: str, body: dict[str, Any], client: int = 0) -> Reply:
    """Streams one reply. Raises RuntimeError if the request fails, or its reply has no text."""
    reply, rest = Reply(time.perf_counter(), client), b""
    with post(port, path, body | {"stream": True, "stream_options": {"include_usage": True}}) as response:
        # The pieces are parsed when all have arrived: clients must cost little.
        arrived = [(time.perf_counter(), data) for data in iter(lambda: response.read1(1 << 16), b"")]
    for at, data in arrived:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            reply.usage = event.get("usage") or reply.usage
            for choice in event.get("choices", []):
                if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                    reply.text += piece
                    reply.arrivals.append(at)
    if not (reply.usage and reply.arrivals):
        end = b"".join(data for _, data in arrived)[-300:].decode(errors="replace").strip()
        raise RuntimeError(f"a request failed (status {response.status}): {end or 'there was no answer'}")
    return reply


def run(load: Load) -> list[Reply]:
    """Returns the replies to all requests. Raises RuntimeError if one fails."""
    origin = time.perf_counter()

    def send(client: int, numbers: random.Random, length: int = load.prompt_tokens) -> Reply:
        prompt = [load.bos, *(numbers.randrange(load.vocab_size) for _ in range(length - 1))]
        body = {"model": load.model, "prompt": prompt, "max_tokens": load.reply_tokens, "temperature": 1.0}
        return stream(load.port, "/v1/completions", body | {"seed": numbers.getrandbits(40)}, client)

    def closed(client: int) -> list[Reply]:
        length, replies = client == 0 and load.long_tokens or load.prompt_tokens, []
        numbers = random.Random(f"{load.seed} {client}")  # its own: threads take turns in no order
        while time.perf_counter() - origin < load.seconds:
            replies.append(send(client, numbers, length))
        return replies

    with ThreadPoolExecutor(MOST_OPEN if load.rate else load.clients) as pool:
        if not load.rate:
            replies = [one for found in pool.map(closed, range(load.clients)) for one in found]
        else:
            sent, at, numbers = [], 0.0, random.Random(load.seed)
            while (at := at + numbers.expovariate(load.rate)) < load.seconds or not sent:
                time.sleep(max(0.0, origin + at - time.perf_counter()))
                sent.append(pool.submit(send, len(sent), random.Random(f"{load.seed} {len(sent)}")))
            replies = [future.result() for future in sent]
    return replies
