"""Throughput and latencies of the HTTP server, as ratios of what the engine decodes without it in the same run.

Its child, `python -m quern.bench.serve`, is the server, as `quern serve` runs it. It also decodes a batch without HTTP,
in the same thread.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse

from quern.bench.data import Setup
from quern.bench.load import Load, Sent
from quern.bench.material import pair_tokenizer, reference, talking_model
from quern.bench.measure import Figure, figure, seconds_of
from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.kernels.attention.autotune import select_attention
from quern.machine import detect, machine_flags
from quern.process import end_with_parent, orders, replying, start
from quern.serve import server

PROMPT_TOKENS, REPLY_TOKENS = 64, 192
ROWS = 32
NAME = "bench"
OFFLINE = "/offline"
"""The path that decodes without HTTP."""
CHATS = 8
"""Chats of two turns in each round."""
TURN_REPLY, QUESTION = 8, 8
"""Tokens of a reply of these chats, and characters of their second questions."""
AROUND = 9
"""Special tokens of a chat of two turns, and room for one token of the second reply."""


def serve(setup: Setup) -> Iterator[Figure]:
    """32 clients in a closed loop, one, 31 beside prompts of a whole context, an open loop at half the rate; chats."""
    length, reply, seconds = (8, 12, 1.0) if setup.quick else (PROMPT_TOKENS, REPLY_TOKENS, 10.0)
    setup.settings.update(prompt_tokens=length, reply_tokens=reply, clients=ROWS, seconds=seconds)
    recipe = reference(setup.quick, setup.seed)
    tokenizer = pair_tokenizer(recipe.model.vocab_size)
    ordinary = tokenizer.vocab_size - len(tokenizer.special_ids)
    order = {"machine": machine_flags(setup.machine), "quick": setup.quick, "seed": setup.seed}
    with start("quern.bench.serve", "server", order) as process:
        ready = process.answer()
        port = ready["port"]
        if setup.machine.compile:
            yield figure("warm-up, once", "s", [ready["warm_up_seconds"]])
        load = Load(port, NAME, ordinary, tokenizer.bos, ROWS, seconds, length, reply, setup.seed)
        closed, offline = [], []
        seeds = itertools.count(setup.seed)  # no prompt is sent twice: it would be known
        for turn in range(setup.rounds):
            alone = {"seed": setup.seed + turn, "ordinary": ordinary, "length": length, "reply": reply}
            with response(port, OFFLINE, alone) as answer:
                offline.append(json.loads(answer.read())["rate"])
            closed.append(sent(replace(load, seed=next(seeds))))
        rates = np.array([rate(one) for one in closed])
        yield figure(f"engine alone, batch {ROWS}", "tokens/s", offline)
        yield figure(f"{ROWS} clients, closed loop", "tokens/s", rates)
        yield figure(f"{ROWS} clients / engine alone", "×", rates / np.array(offline))
        yield from latencies(f"{ROWS} clients", closed)
        single = [sent(replace(load, clients=1, seed=next(seeds))) for _ in range(setup.rounds)]
        yield figure("1 client", "tokens/s", [rate(one) for one in single])
        yield from latencies("1 client", single)
        whole = replace(load, long_tokens=recipe.model.context - reply - 1)
        beside = [[one for one in sent(replace(whole, seed=next(seeds))) if one.client] for _ in range(setup.rounds)]
        yield from latencies(f"{ROWS - 1} clients beside prompts of {whole.long_tokens} tokens", beside)
        half = rates.mean() / reply / 2
        opened = [sent(replace(load, rate=half, seed=next(seeds))) for _ in range(setup.rounds)]
        yield from latencies(f"open loop, {half:.1f} requests/s", opened)
        yield from second_turns(setup, port, recipe.model.context)


def offline_rate(engine: Engine, seed: int, ordinary: int, length: int, reply: int) -> float:
    """Tokens a second of one batch of ROWS replies, prompts included: what the closed loop could reach."""
    numbers = np.random.default_rng(seed)
    prompts = [[engine.tokenizer.bos, *numbers.integers(0, ordinary, length - 1).tolist()] for _ in range(ROWS)]
    seconds = seconds_of(lambda: engine.generate(prompts, max_tokens=reply, sampling=Sampling(), seed=seed))
    return ROWS * reply / seconds


@contextlib.contextmanager
def response(port: int, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()


def rate(requests: Sequence[Sent]) -> float:
    """Tokens a second while all clients were busy: up to the last start of a request, the share that had arrived."""
    until = max(one.start for one in requests)
    arrived = (one.tokens * np.mean(np.array(one.arrivals) <= until) for one in requests if one.arrivals)
    return float(sum(arrived)) / until


def latencies(name: str, rounds: Sequence[Sequence[Sent]]) -> Iterator[Figure]:
    """Time to the first token, gaps between pieces; medians and 95th percentiles of each round."""
    first = [[one.arrivals[0] - one.start for one in requests] for requests in rounds]
    gaps = [np.concatenate([np.diff(one.arrivals) for one in requests]) for requests in rounds]
    for title, values in (("time to first token", first), ("gap between pieces", gaps)):
        for share in (50, 95):
            found = [1000 * np.percentile(own, share) for own in values]
            yield figure(f"{name}: {title}, {share}th percentile", "ms", found)
    ratios = [np.percentile(own, 95) / np.percentile(own, 50) for own in gaps]
    yield figure(f"{name}: 95th percentile / median of gaps", "×", ratios)


def sent(load: Load) -> list[Sent]:
    """Runs the load generator in a process of its own. Raises RuntimeError if a request failed."""
    command = [sys.executable, "-m", "quern.bench.load"]
    done = subprocess.run(command, input=json.dumps(asdict(load)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr[-500:]}")
    requests = [Sent(**json.loads(line)) for line in done.stdout.splitlines()]
    failed = [one.error for one in requests if one.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(requests)} requests failed, the first with: {failed[0]}")
    return requests


class Turn(NamedTuple):
    """One turn of a chat. seconds: until its first text."""

    seconds: float
    text: str
    prompt_tokens: int
    cached_tokens: int


def second_turns(setup: Setup, port: int, context: int) -> Iterator[Figure]:
    """Chats of one client, each with another first question of about the whole context: how much sooner a second turn
    answers. In the benchmark's tokenizer a character is a token."""
    rounds = []
    for number in range(setup.rounds + 1):
        numbers = random.Random(f"{setup.seed} {number}")
        rounds.append([two_turns(port, context, numbers) for _ in range(CHATS)])
    kept = rounds[1:]  # the first one warms up
    one, two = np.median([[[turn.seconds for turn in pair] for pair in pairs] for pairs in kept], axis=1).T
    cached = [second.cached_tokens / second.prompt_tokens for pairs in kept for _, second in pairs]
    size = kept[0][0][0].prompt_tokens
    yield figure(f"first turn of {size} tokens: time to first token, median", "ms", 1000 * one)
    yield figure("second turn of that chat: time to first token, median", "ms", 1000 * two)
    note = f"{np.mean(cached):.0%} of the prompt cached"
    yield figure("first turn / second turn: time to first token", "×", one / two, note)


def two_turns(port: int, context: int, numbers: random.Random) -> tuple[Turn, Turn]:
    """A new chat. A token of a reply has at most two bytes, so the second turn fits into the context."""
    length = context - AROUND - 2 * TURN_REPLY - QUESTION
    asked = "".join(numbers.choices(string.ascii_letters, k=length))
    messages = [{"role": "user", "content": asked}]
    first = chat_turn(port, messages)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": asked[:QUESTION]}]
    return first, chat_turn(port, messages)


def chat_turn(port: int, messages: list[dict[str, str]]) -> Turn:
    """Streams one turn. Raises RuntimeError if it failed."""
    body: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": TURN_REPLY, "seed": 0, "stream": True}
    text, start, arrived, usage = "", time.perf_counter(), 0.0, None
    with response(port, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}}) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                text += choice["delta"].get("content") or ""
                arrived = arrived or (time.perf_counter() if text else 0.0)
    if usage is None or not arrived:
        raise RuntimeError("a turn of a chat failed, or had no text")
    return Turn(arrived - start, text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def main() -> None:
    """The child: the server of the reference model, on a port that it tells its parent."""
    order, requests = orders()
    threading.Thread(target=end_with_parent, args=(requests,), daemon=True).start()
    with replying() as reply, server.listen("127.0.0.1", 0) as listener:
        machine = select_attention(detect(**order["machine"]))
        recipe = reference(order["quick"], order["seed"])
        tokenizer = pair_tokenizer(recipe.model.vocab_size)
        engine = Engine(talking_model(recipe, tokenizer, machine), tokenizer, machine, prefix_megabytes=256)
        seconds = seconds_of(lambda: engine.warm_up(server.WARM_ROWS))
        app = server.create_app({NAME: engine})
        worker = app.state.models.find(NAME)

        async def offline(request: Request) -> JSONResponse:
            arguments = await request.json()
            return JSONResponse({"rate": await worker.call(lambda: offline_rate(engine, **arguments))})

        app.add_route(OFFLINE, offline, methods=["POST"])
        reply({"port": listener.getsockname()[1], "warm_up_seconds": seconds})
        server.serve(app, [listener])


if __name__ == "__main__":
    main()
