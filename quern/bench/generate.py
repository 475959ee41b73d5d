"""Benchmarks of the engine with the reference model: reading prompts (prefill) and writing replies (decode)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.benchmark.utils.timer import timer

from quern.bench.data import Setup
from quern.bench.material import reference
from quern.bench.measure import Figure, alternate, figure, seconds_of
from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.machine import Machine
from quern.recipe import Resolved
from quern.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from quern.train.state import build_model

ROWS = (1, 8, 32)
PREFILL_PROMPT_TOKENS = 384
PROMPT_TOKENS, REPLY_TOKENS = 64, 192


def prefill(setup: Setup) -> Iterator[Figure]:
    """Prompt tokens per second, up to the first token of each reply."""
    setup.settings["prompt_tokens"] = length = 16 if setup.quick else PREFILL_PROMPT_TOKENS
    engine = _engine(setup)
    taken = alternate(setup.rounds, {str(rows): _replies(engine, setup.seed, rows, length, 1) for rows in ROWS})
    yield from (figure(f"prefill, batch {rows}", "tokens/s", rows * length / taken[str(rows)]) for rows in ROWS)


def decode(setup: Setup) -> Iterator[Figure]:
    """Reply tokens per second: eager, as a chat begins, and after `warm_up`, where the machine compiles."""
    length, reply = (8, 12) if setup.quick else (PROMPT_TOKENS, REPLY_TOKENS)
    setup.settings.update(prompt_tokens=length, reply_tokens=reply, temperature="1, greedy: 0")
    ways = {"eager": (_engine(setup), 1.0)}
    if setup.machine.compile:
        ways["warmed up"] = warm, _ = _engine(setup), 1.0
        yield figure("warm-up, once", "s", seconds_of(lambda: warm.warm_up(ROWS)), f"batch {', '.join(map(str, ROWS))}")
    faster = list(ways)[-1]
    ways[f"{faster}, greedy"] = ways[faster][0], 0.0
    for rows in ROWS:

        def tail(engine: Engine, temperature: float, rows: int = rows) -> Callable[[], float]:
            whole, first = (_replies(engine, setup.seed, rows, length, n, temperature) for n in (reply, 1))
            return lambda: max(whole() - first(), 1e-9)

        taken = alternate(setup.rounds, {name: tail(*way) for name, way in ways.items()})
        for name, seconds in taken.items():
            yield figure(f"batch {rows}, {name}", "tokens/s", rows * (reply - 1) / seconds)
        if setup.machine.compile:
            yield figure(f"batch {rows}, warmed up / eager", "×", taken["eager"] / taken["warmed up"])


def _engine(setup: Setup) -> Engine:
    return talking_engine(reference(setup.quick, setup.seed), setup.machine)


def _replies(
    engine: Engine, seed: int, rows: int, length: int, reply: int, temperature: float = 1.0
) -> Callable[[], float]:
    """Returns a function that times replies of `reply` tokens to random prompts of `length` tokens."""
    ordinary = engine.tokenizer.vocab_size - len(engine.tokenizer.special_ids)
    ids = torch.randint(ordinary, (rows, length - 1), generator=torch.Generator().manual_seed(seed))
    prompts = [[engine.tokenizer.bos, *row] for row in ids.tolist()]

    def job() -> float:
        start = timer()
        done = engine.generate(prompts, max_tokens=reply, sampling=Sampling(temperature))
        seconds, lengths = timer() - start, {len(row[0].ids) for row in done}
        if lengths != {reply}:
            raise RuntimeError(f"a reply of the benchmark ended early ({lengths} tokens): report it")
        return seconds

    return job


def pair_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns an untrained tokenizer of that size: the bytes, and pairs of bytes."""
    room = vocab_size - 256 - len(SPECIAL_TOKENS)
    return Tokenizer([bytes([i // 256, i % 256]) for i in range(room)])


@torch.no_grad()
def talking_engine(recipe: Resolved, machine: Machine, prefix_megabytes: float = 0) -> Engine:
    """Returns an engine with a random model whose replies never end early or call a tool: the logits spread over the
    whole softcap, and those of the special tokens are zero, so that it draws one of them about once in a million
    tokens."""
    tokenizer = pair_tokenizer(recipe.model.vocab_size)
    model = build_model(recipe, machine, recipe.seed)
    numbers = machine.generator(recipe.seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * parameter.size(-1) ** -0.5)
    model.head.weight.mul_(model.head.weight.size(-1) ** 0.5)
    model.head.weight[list(tokenizer.special_ids.values())] = 0
    return Engine(model.eval(), tokenizer, machine, prefix_megabytes=prefix_megabytes)
