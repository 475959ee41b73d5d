"""Throughput and latencies of the HTTP server, beside what the engine decodes without it in the same run.

The child, `python -m quern.bench.serve`, is the server, as `quern serve` runs it; it also decodes without HTTP.
"""

from __future__ import annotations

import itertools
import json
import random
import string
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse

from quern.bench.generate import pair_tokenizer, talking_engine
from quern.bench.load import Load, Reply, post, run, stream
from quern.bench.material import reference
from quern.bench.measure import Figure, Setup, figure, seconds_of
from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.kernels.attention.autotune import select_attention
from quern.machine import detect, machine_flags
from quern.process import end_with_parent, orders, replying, start
from quern.serve import server

PROMPT_TOKENS, REPLY_TOKENS = 64, 192
ROWS = 32
NAME = "bench"
OFFLINE = "/offline"  # the path that decodes without HTTP
CHATS = 8  # chats of two turns in each round
TURN_REPLY, QUESTION = 8, 8  # tokens of a reply of these chats, and characters of their second questions
AROUND = 9  # special tokens of a chat of two turns, and room for one token of the second reply


def serve(setup: Setup) -> Iterator[Figure]:
    """32 clients in a closed loop, one, 31 beside prompts of a whole context, an open loop at half the rate; chats."""
    length, reply, seconds = (8, 12, 1.0) if setup.quick else (PROMPT_TOKENS, REPLY_TOKENS, 10.0)
    setup.settings.update(prompt_tokens=length, reply_tokens=reply, clients=ROWS, seconds=seconds)
    recipe = reference(setup.quick, setup.seed, device=setup.machine.device.type)
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
            with post(port, OFFLINE, alone) as answer:
                offline.append(json.loads(answer.read())["rate"])
            closed.append(run(replace(load, seed=next(seeds))))
        rates = np.array([rate(one) for one in closed])
        yield figure(f"engine alone, batch {ROWS}", "tokens/s", offline)
        yield figure(f"{ROWS} clients, closed loop", "tokens/s", rates)
        yield figure(f"{ROWS} clients / engine alone", "×", rates / np.array(offline))
        yield from latencies(f"{ROWS} clients", closed)
        single = [run(replace(load, clients=1, seed=next(seeds))) for _ in range(setup.rounds)]
        yield figure("1 client", "tokens/s", [rate(one) for one in single])
        yield from latencies("1 client", single)
        whole = replace(load, long_tokens=recipe.model.context - reply - 1)
        beside = [[one for one in run(replace(whole, seed=next(seeds))) if one.client] for _ in range(setup.rounds)]
        yield from latencies(f"{ROWS - 1} clients beside prompts of {whole.long_tokens} tokens", beside)
        half = rates.mean() / reply / 2
        opened = [run(replace(load, rate=half, seed=next(seeds))) for _ in range(setup.rounds)]
        yield from latencies(f"open loop, {half:.1f} requests/s", opened)
        yield from second_turns(setup, port, recipe.model.context)


def offline_rate(engine: Engine, seed: int, ordinary: int, length: int, reply: int) -> float:
    """Tokens a second of one batch of ROWS replies, prompts included: what the closed loop could reach."""
    numbers = np.random.default_rng(seed)
    prompts = [[engine.tokenizer.bos, *numbers.integers(0, ordinary, length - 1).tolist()] for _ in range(ROWS)]
    seconds = seconds_of(lambda: engine.generate(prompts, max_tokens=reply, sampling=Sampling(), seed=seed))
    return ROWS * reply / seconds


def rate(replies: Sequence[Reply]) -> float:
    """Tokens a second while all clients are busy: from the first request until one client has its last reply."""
    first, ends = min(one.start for one in replies), {one.client: one.arrivals[-1] for one in replies}
    last = min(ends.values())
    arrived = (one.usage["completion_tokens"] * np.mean(np.array(one.arrivals) <= last) for one in replies)
    return float(sum(arrived)) / (last - first)


def latencies(name: str, rounds: Sequence[Sequence[Reply]]) -> Iterator[Figure]:
    """Time to the first token, gaps between pieces; medians and 95th percentiles of each round."""
    first = [[one.arrivals[0] - one.start for one in replies] for replies in rounds]
    gaps = [np.concatenate([np.diff(one.arrivals) for one in requests]) for requests in rounds]
    for title, values in (("time to first token", first), ("gap between pieces", gaps)):
        for share in (50, 95):
            found = [1000 * np.percentile(own, share) for own in values]
            yield figure(f"{name}: {title}, {share}th percentile", "ms", found)
    ratios = [np.percentile(own, 95) / np.percentile(own, 50) for own in gaps]
    yield figure(f"{name}: 95th percentile / median of gaps", "×", ratios)


def second_turns(setup: Setup, port: int, context: int) -> Iterator[Figure]:
    """Chats of one client whose first question fills the context: how much sooner a second turn answers. In the
    benchmark's tokenizer a character is a token, or in a large vocabulary a pair of them."""
    rounds = []
    for number in range(setup.rounds + 1):
        numbers = random.Random(f"{setup.seed} {number}")
        rounds.append([two_turns(port, context, numbers) for _ in range(CHATS)])
    kept = rounds[1:]  # the first one warms up
    waits = [[[turn.arrivals[0] - turn.start for turn in pair] for pair in pairs] for pairs in kept]
    one, two = np.median(waits, axis=1).T
    second = [pair[1].usage for pairs in kept for pair in pairs]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"] for usage in second]
    size = kept[0][0][0].usage["prompt_tokens"]
    yield figure(f"first turn of {size} tokens: time to first token, median", "ms", 1000 * one)
    yield figure("second turn of that chat: time to first token, median", "ms", 1000 * two)
    note = f"{np.mean(cached):.0%} of the prompt cached"
    yield figure("first turn / second turn: time to first token", "×", one / two, note)


def two_turns(port: int, context: int, numbers: random.Random) -> list[Reply]:
    """A new chat. A token of a reply has at most two bytes, so the second turn fits into the context."""
    asked = "".join(numbers.choices(string.ascii_letters, k=context - AROUND - 2 * TURN_REPLY - QUESTION))
    messages: list[dict[str, str]] = []
    turns: list[Reply] = []
    for question in (asked, asked[:QUESTION]):
        messages.append({"role": "user", "content": question})
        body = {"model": NAME, "messages": messages, "max_tokens": TURN_REPLY, "seed": 0}
        turns.append(stream(port, "/v1/chat/completions", body))
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns


def main() -> None:
    """The child: the server of the reference model, on a port that it tells its parent."""
    order, requests = orders()
    threading.Thread(target=end_with_parent, args=(requests,), daemon=True).start()
    with replying() as reply, server.listen("127.0.0.1", 0) as listener:
        machine = select_attention(detect(**order["machine"]))
        recipe = reference(order["quick"], order["seed"], device=machine.device.type)
        engine = talking_engine(recipe, machine, prefix_megabytes=256)
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
