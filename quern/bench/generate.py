"""Benchmarks of generation with the reference model: reading prompts (prefill) and writing replies (decode).

Both go through the engine, so the time includes cache, sampling, replies and tools, as in a chat. No row ends early
(see `talking_model`). The time of decoding is that of a long reply less that of a reply of one token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quern.bench.material import pair_tokenizer, reference, talking_model
from quern.bench.record import Measure, Outcome, Setup, alternate, rates, ratios, seconds_of
from quern.generate.engine import Engine
from quern.generate.sample import Sampling

ROWS = (1, 8, 32)
PREFILL_PROMPT_TOKENS = 384
PROMPT_TOKENS, REPLY_TOKENS = 64, 192


def prefill(setup: Setup) -> Outcome:
    """Prompt tokens per second, up to the first token of each reply."""
    length = 16 if setup.quick else PREFILL_PROMPT_TOKENS
    engine = _engine(setup)
    taken = alternate(setup.rounds, {str(rows): _reply_job(engine, setup, rows, length, 1, 1.0) for rows in ROWS})
    measures = [Measure(f"prefill, batch {rows}", "tokens/s", rates(rows * length, taken[str(rows)])) for rows in ROWS]
    return Outcome(measures, {"prompt_tokens": length})


def decode(setup: Setup) -> Outcome:
    """Reply tokens per second: eager, as a chat begins, and after `warm_up`, where the machine compiles."""
    length, reply = (8, 12) if setup.quick else (PROMPT_TOKENS, REPLY_TOKENS)
    engines, measures = {"eager": _engine(setup)}, []
    if setup.machine.compile:
        engines["warmed up"] = _engine(setup)
        warming = seconds_of(lambda: engines["warmed up"].warm_up(ROWS), setup.machine)
        measures.append(Measure("warm-up, once", "s", (warming,), f"batch {', '.join(map(str, ROWS))}"))
    faster = list(engines)[-1]
    for rows in ROWS:
        jobs = {name: _decode_job(engine, setup, rows, length, reply, 1.0) for name, engine in engines.items()}
        jobs[f"{faster}, greedy"] = _decode_job(engines[faster], setup, rows, length, reply, 0.0)
        speeds = {k: rates(rows * (reply - 1), seconds) for k, seconds in alternate(setup.rounds, jobs).items()}
        measures += [Measure(f"batch {rows}, {name}", "tokens/s", speeds[name]) for name in jobs]
        if setup.machine.compile:
            ratio = ratios(speeds["warmed up"], speeds["eager"])
            measures.append(Measure(f"batch {rows}, warmed up / eager", "×", ratio))
    return Outcome(measures, {"prompt_tokens": length, "reply_tokens": reply, "temperature": "1, greedy: 0"})


def _engine(setup: Setup) -> Engine:
    recipe = reference(setup.quick, setup.seed)
    assert recipe.model.vocab_size
    tokenizer = pair_tokenizer(recipe.model.vocab_size)
    return Engine(talking_model(recipe, tokenizer, setup.machine), tokenizer, setup.machine)


def _reply_job(
    engine: Engine, setup: Setup, rows: int, length: int, reply: int, temperature: float
) -> Callable[[], float]:
    """Returns a function that times replies of `reply` tokens to random prompts of `length` tokens.

    The function raises RuntimeError if a reply is shorter.
    """
    ordinary = engine.tokenizer.vocab_size - len(engine.tokenizer.special_ids)
    ids = torch.randint(ordinary, (rows, length - 1), generator=torch.Generator().manual_seed(setup.seed))
    prompts = [[engine.tokenizer.bos, *row] for row in ids.tolist()]

    def job() -> float:
        done = []
        seconds = seconds_of(
            lambda: done.extend(engine.generate(prompts, max_tokens=reply, sampling=Sampling(temperature))),
            setup.machine,
        )
        said = {len(row[0].ids) for row in done}
        if said != {reply}:
            raise RuntimeError(f"a reply of the benchmark ended early ({said} tokens): report it")
        return seconds

    return job


def _decode_job(
    engine: Engine, setup: Setup, rows: int, length: int, reply: int, temperature: float
) -> Callable[[], float]:
    """Returns a function that times all tokens after the first one of each row."""
    whole = _reply_job(engine, setup, rows, length, reply, temperature)
    first = _reply_job(engine, setup, rows, length, 1, temperature)
    return lambda: max(whole() - first(), 1e-9)
