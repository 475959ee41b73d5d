"""Benchmarks of generation with the reference model: reading prompts (prefill) and writing replies
(decode).

All through the engine, so that what is timed is what a chat gets: cache, sampling, replies and tools
included. Rows never end early (see `talking_model`). Decoding's time is that of a long reply less that of a
reply of one token.
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
    """Prompts read, up to the first token of each reply; tokens of prompts per second."""
    length = 16 if setup.quick else PREFILL_PROMPT_TOKENS
    engine = _engine(setup)
    jobs: dict[str, Callable[[], float]] = {str(rows): _reply_job(engine, setup, rows, length, 1, 1.0) for rows in ROWS}
    taken = alternate(setup.rounds, jobs)
    measures = [Measure(f"prefill, batch {rows}", "tokens/s", rates(rows * length, taken[str(rows)])) for rows in ROWS]
    return Outcome(measures, {"prompt_tokens": length})


def decode(setup: Setup) -> Outcome:
    """Tokens of replies per second: as a chat begins, and warmed up, as a server is, where the machine
    compiles."""
    length, reply = (8, 12) if setup.quick else (PROMPT_TOKENS, REPLY_TOKENS)
    engines, measures = {"eager": _engine(setup)}, []
    if setup.machine.compile:
        engines["warmed up"] = _engine(setup)
        warming = seconds_of(lambda: engines["warmed up"].warm_up(ROWS), setup.machine)
        measures.append(Measure("warm-up, once", "s", (warming,), f"batch {', '.join(map(str, ROWS))}"))
    for rows in ROWS:
        jobs: dict[str, Callable[[], float]] = {
            name: _decode_job(engine, setup, rows, length, reply, 1.0) for name, engine in engines.items()
        }
        # What sampling costs shows on the faster engine.
        faster = list(engines)[-1]
        jobs[f"{faster}, greedy"] = _decode_job(engines[faster], setup, rows, length, reply, 0.0)
        taken = alternate(setup.rounds, jobs)
        speeds = {name: rates(rows * (reply - 1), seconds) for name, seconds in taken.items()}
        measures += [Measure(f"batch {rows}, {name}", "tokens/s", speeds[name]) for name in jobs]
        if len(engines) > 1:
            measures.append(
                Measure(f"batch {rows}, warmed up / eager", "×", ratios(speeds["warmed up"], speeds["eager"]))
            )
    return Outcome(measures, {"prompt_tokens": length, "reply_tokens": reply, "temperature": "1, greedy: 0"})


def _engine(setup: Setup) -> Engine:
    recipe = reference(setup.quick, setup.seed)
    assert recipe.model.vocab_size
    tokenizer = pair_tokenizer(recipe.model.vocab_size)
    return Engine(talking_model(recipe, tokenizer, setup.machine), tokenizer, setup.machine)


def _prompts(engine: Engine, rows: int, length: int, seed: int) -> list[list[int]]:
    """Random prompts without special tokens but the leading BOS."""
    ordinary = engine.tokenizer.vocab_size - len(engine.tokenizer.special_ids)
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(ordinary, (rows, length - 1), generator=numbers)
    return [[engine.tokenizer.bos, *row] for row in ids.tolist()]


def _reply_job(
    engine: Engine, setup: Setup, rows: int, length: int, reply: int, temperature: float
) -> Callable[[], float]:
    """Seconds until every row has said `reply` tokens. Raises RuntimeError when one stopped before that."""
    prompts = _prompts(engine, rows, length, setup.seed)

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
    """Seconds of all tokens after each row's first."""
    whole = _reply_job(engine, setup, rows, length, reply, temperature)
    first = _reply_job(engine, setup, rows, length, 1, temperature)
    return lambda: max(whole() - first(), 1e-9)
