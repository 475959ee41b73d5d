"""Benchmarks of the engine with the reference model: reading prompts (prefill) and writing replies (decode)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.benchmark.utils.timer import timer

from quern.bench.material import reference
from quern.bench.measure import Figure, Seconds, Setup, alternate, call_seconds, figure, seconds_of
from quern.generate.cache import KVCache
from quern.generate.compiled import SPAN, CompiledDecode
from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.machine import Machine
from quern.model.base import LanguageModel
from quern.model.count import parameters
from quern.recipe import Resolved
from quern.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from quern.train.state import build_model

PREFILL_PROMPT_TOKENS = 384


def prefill(setup: Setup) -> Iterator[Figure]:
    """Prompt tokens per second, up to the first token of each reply."""
    setup.settings["prompt_tokens"] = length = 16 if setup.quick else PREFILL_PROMPT_TOKENS
    engine, batches = _engine(setup), setup.sizes.rows
    taken = alternate(setup.rounds, {str(rows): _replies(engine, setup.seed, rows, length, 1, 1.0) for rows in batches})
    yield from (figure(f"prefill, batch {rows}", "tokens/s", rows * length / taken[str(rows)]) for rows in batches)


def decode(setup: Setup) -> Iterator[Figure]:
    """Reply tokens per second: eager, as a chat begins, and after `warm_up`, where the machine compiles. For greedy
    replies and for the compiled step without the engine, also the share of the memory's bandwidth that they use."""
    length, reply, batches = setup.sizes.prompt_tokens, setup.sizes.reply_tokens, setup.sizes.rows
    setup.settings.update(prompt_tokens=length, reply_tokens=reply, temperature="1, greedy: 0")
    ways = {"eager": (_engine(setup), 1.0)}
    if setup.machine.compile:
        ways["warmed up"] = _engine(setup), 1.0
    faster = list(ways)[-1]
    greedy = f"{faster}, greedy"
    ways[greedy] = fastest, _ = ways[faster][0], 0.0
    bandwidth, cache = copied_bytes_per_second(setup), KVCache(fastest.model, 1, fastest.context)
    yield figure("copying memory", "GB/s", bandwidth / 1e9)
    if setup.machine.compile:
        share = 100 * bytes_of_a_step(_recipe(setup), cache, 1, length + 1) / bandwidth
        for name, seconds in step_alone(setup, fastest.model, fastest.context, length).items():
            yield figure(f"batch 1, {name}: of the bandwidth", "%", share / seconds, f"{1e3 * min(seconds):.2f} ms")
    for rows in batches:
        warm_up = seconds_of(lambda rows=rows: fastest.warm_up([rows]))

        def tail(engine: Engine, temperature: float, rows: int = rows) -> Callable[[], float]:
            whole, first = (_replies(engine, setup.seed, rows, length, n, temperature) for n in (reply, 1))
            return lambda: max(whole() - first(), 1e-9)

        taken = alternate(setup.rounds, {name: tail(*way) for name, way in ways.items()})
        for name, seconds in taken.items():
            yield figure(f"batch {rows}, {name}", "tokens/s", rows * (reply - 1) / seconds)
        moved = bytes_of_a_step(_recipe(setup), cache, rows, length + reply // 2)
        share = 100 * moved * (reply - 1) / bandwidth / taken[greedy]
        yield figure(f"batch {rows}, {greedy}: of the bandwidth", "%", share, f"{moved / 1e6:,.0f} MB a step")
        if setup.machine.compile:
            yield figure(f"batch {rows}, warm-up", "s", warm_up)
            yield figure(f"batch {rows}, warmed up / eager", "×", taken["eager"] / taken["warmed up"])


@torch.inference_mode()
def step_alone(setup: Setup, model: LanguageModel, context: int, length: int) -> Seconds:
    """Times the compiled step of one row, without the engine; each call decodes from the same position."""
    step, device = CompiledDecode(model, context), setup.machine.device
    step.warm_up(1)
    cache, tokens_BT = KVCache(model, 1, step.max_tokens), torch.zeros(1, length, dtype=torch.int64, device=device)
    cache.prefill(model, tokens_BT, torch.full((1,), length, device=device), setup.machine.attention)
    position_B, slots_S = cache.positions_B.clone(), torch.arange((length // SPAN + 1) * SPAN, device=device)
    token_B = torch.zeros(1, dtype=torch.int64, device=device)  # with the stride that was warmed up

    def once() -> object:
        cache.positions_B.copy_(position_B)
        return step(cache, token_B, slots_S)

    return setup.seconds({"the compiled step alone": once})


def _recipe(setup: Setup) -> Resolved:
    return reference(setup.quick, setup.seed, device=setup.machine.device.type)


def _engine(setup: Setup) -> Engine:
    return talking_engine(_recipe(setup), setup.machine, max_rows=max(64, *setup.sizes.rows))


def copied_bytes_per_second(setup: Setup) -> float:
    """Measures a large copy of random numbers: on zeros a GPU draws less power and runs faster than on data."""
    copied, machine = setup.sizes.copied, setup.machine
    x = torch.randint(0, 100, (copied,), device=machine.device, dtype=torch.int8)
    y = torch.empty_like(x)
    return 2 * copied / min(call_seconds(lambda: y.copy_(x), machine, setup.quick) for _ in range(3))


def _replies(engine: Engine, seed: int, rows: int, length: int, reply: int, temperature: float) -> Callable[[], float]:
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


def bytes_of_a_step(recipe: Resolved, cache: KVCache, rows: int, seen: int) -> int:
    """Returns the bytes of the weights that multiply each token, and of the keys and values that each query sees."""
    shape = recipe.model
    slots = sum(min(keys.size(2), seen) for keys in cache.keys_BKRE)
    values = parameters(recipe).kaplan + rows * 2 * slots * shape.kv_heads * shape.head_dim
    return cache.keys_BKRE[0].element_size() * values


def pair_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns an untrained tokenizer of that size: the bytes, and pairs of bytes."""
    room = vocab_size - 256 - len(SPECIAL_TOKENS)
    return Tokenizer([bytes([i // 256, i % 256]) for i in range(room)])


@torch.no_grad()
def talking_engine(recipe: Resolved, machine: Machine, prefix_megabytes: float = 0, max_rows: int = 64) -> Engine:
    """Returns an engine with a random model whose replies never end early or call a tool: the logits spread over the
    whole softcap, and those of the special tokens are zero, so that it draws one of them about once in a million
    tokens."""
    tokenizer = pair_tokenizer(recipe.model.vocab_size)
    model = build_model(recipe, machine, recipe.seed)
    numbers = torch.Generator().manual_seed(recipe.seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * parameter.size(-1) ** -0.5)
    model.head.weight.mul_(model.head.weight.size(-1) ** 0.5)
    model.head.weight[list(tokenizer.special_ids.values())] = 0
    return Engine(model.eval(), tokenizer, machine, max_rows, prefix_megabytes)
