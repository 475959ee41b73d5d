"""Joined late, read in pieces, continued from a kept prefix, beside cancelled rows = alone; gpt, unet and llama.

The oracle is an engine that answers one request at a time and keeps no prefixes. Tokens are equal for a seed, greedy or
sampled; log-probabilities agree within 1e-5 in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from experiments.bigram import BigramGPT
from quern.generate.engine import Engine
from quern.generate.reply import Completion, Generation
from quern.generate.sampling import GREEDY, Sampling
from quern.model.base import LanguageModel
from quern.model.llama import Llama
from tests.laws.table import Law
from tests.support.toy_engine import CPU, toy_model, toy_tokenizer, toy_unet

BAR = 1e-5
CONTEXT = 96
TOKENIZER = toy_tokenizer()


def toy(windows: str, **options: Any) -> Callable[[], LanguageModel]:
    return lambda: toy_model(windows, context=CONTEXT, vocab_size=TOKENIZER.vocab_size, **options)


MODELS: dict[str, Callable[[], LanguageModel]] = {
    "gpt": toy("SSSL"),
    "gpt, window 2, grouped queries": toy("SL", window=2, kv_heads=2),
    "gpt, long windows": toy("L", kv_heads=1),
    "llama": toy("L", kv_heads=2, make_model=Llama),
    "llama, windows": toy("SSSL", window=5, make_model=Llama),
    "gpt, bigrams": toy("SL", make_model=BigramGPT),
    "unet": lambda: toy_unet(context=CONTEXT, vocab_size=TOKENIZER.vocab_size, bos=TOKENIZER.bos),
}
SCHEDULES = [("gpt", 0, None), *((name, 1, 7) for name in MODELS), ("unet", 2, 64)]
SAMPLINGS = (
    GREEDY,
    Sampling(),
    Sampling(0.7, top_k=9),
    Sampling(1.3, top_p=0.8, presence_penalty=0.7, frequency_penalty=-0.3),
    Sampling(0.0, repetition_penalty=1.4),
)


@dataclass
class Request:
    """A request that arrives, and its outcome."""

    at: int
    prompt: list[int]
    options: dict[str, Any]
    cancelled_at: int | None = None
    generation: Generation | None = None
    replies: dict[int, Completion] = field(default_factory=dict)


def requests(seed: int, count: int = 7) -> list[Request]:
    """Prompts that begin alike, repeat, or go on where another one's reply ended; random lengths and arrivals."""
    random = np.random.default_rng(seed)
    system = [TOKENIZER.bos, *random.integers(0, 256, 24).tolist()]
    made: list[Request] = []
    for number in range(count):
        kind = random.integers(4)
        tail = random.integers(0, 256, random.integers(1, 40)).tolist()
        prompt = system + tail if kind < 2 else [TOKENIZER.bos, *tail]
        if kind == 3 and made:
            prompt = list(made[random.integers(len(made))].prompt)
        tokens, sampling = int(random.integers(1, 30)), SAMPLINGS[random.integers(len(SAMPLINGS))]
        samples, plain = int(random.integers(1, 4)), bool(random.integers(2))
        options = {"max_tokens": tokens, "sampling": sampling, "seed": number, "samples": samples, "plain": plain}
        options |= {"logprobs": 2, "bias": {7: 1.5, 300: -100.0} if random.integers(3) == 0 else None}
        at = int(random.integers(0, 40))
        made.append(Request(at, prompt, options, at + 3 if random.integers(6) == 0 else None))
    return made


def run(engine: Engine, asked: list[Request], most: int | None) -> None:
    """Submits each request at its step; asks again with the reply appended, as the next turn of a chat does."""
    turns: list[Request] = []
    for step in range(2000):
        for request in [*asked, *turns]:
            if request.at == step:
                request.generation = engine.submit([request.prompt], **request.options)
            if request.cancelled_at == step and request.generation is not None:
                request.generation.cancelled = True
        engine.step(most)
        for number, request in enumerate([*asked, *turns]):
            while request.generation is not None and request.generation.events:
                event = request.generation.events.popleft()
                if not isinstance(event.value, Completion):
                    continue
                request.replies[event.sample] = event.value
                longer, first = [*request.prompt, *event.value.ids, 5, 6], number < len(asked) and event.sample == 0
                if first and len(longer) < CONTEXT and request.cancelled_at is None:
                    turns.append(Request(step + 1, longer, request.options))
        open_ones = [r for r in (*asked, *turns) if r.cancelled_at is None and len(r.replies) < r.options["samples"]]
        if not open_ones and step > 45:
            break
    asked += turns


def deviation(make_model: Callable[[], LanguageModel], seed: int, budget: int | None, max_rows: int = 5) -> float:
    """Largest difference of a log-probability; infinite if a token, a text or an end differs."""
    model = make_model()
    busy, alone = Engine(model, TOKENIZER, CPU, max_rows, prefix_megabytes=4), Engine(model, TOKENIZER, CPU)
    asked = requests(seed)
    run(busy, asked, budget)
    assert any(reply.cached_tokens for request in asked for reply in request.replies.values()) and not busy.running
    worst, answered = 0.0, 0
    for request in asked:
        if request.cancelled_at is not None:
            continue
        [expected] = alone.generate([request.prompt], **request.options)
        for sample, whole in enumerate(expected):
            found = request.replies[sample]
            answered += 1
            if (found.ids, found.text, found.finish_reason) != (whole.ids, whole.text, whole.finish_reason):
                return float("inf")
            worst = max(worst, float(np.abs(np.subtract(found.logprobs, whole.logprobs)).max()))
            assert all(len(top) == 2 for top in found.top_logprobs) and len(found.top_logprobs) == len(found.ids)
    assert answered > 10
    return worst


@pytest.mark.parametrize(("model", "seed", "budget"), SCHEDULES)
def test_in_any_company_is_alone(model: str, seed: int, budget: int | None, law: Law) -> None:
    name = "joined late, read in pieces, from a kept prefix = alone: log-probabilities, fp32; tokens equal"
    law(name, deviation(MODELS[model], seed, budget), BAR)


NO_END: dict[str, Any] = {"plain": True, "bias": dict.fromkeys(TOKENIZER.special_ids.values(), -1e9)}
"""Options of a reply that ends at max_tokens only."""


def test_cancelled_rows_free_their_seats_at_once() -> None:
    engine = Engine(MODELS["gpt"](), TOKENIZER, CPU, max_rows=2)
    running = [engine.submit([[TOKENIZER.bos, n]], max_tokens=80, **NO_END) for n in range(2)]
    waiting = engine.submit([[TOKENIZER.bos, 9]], max_tokens=2, **NO_END)
    for _ in range(3):
        engine.step()
    assert engine.running == 2 and len(engine.waiting) == 1 and not waiting.events
    running[0].cancelled = True
    engine.step()
    assert engine.running == 2 and not engine.waiting
    events = len(running[0].events)
    running[1].cancelled = True
    waiting.cancelled = True
    engine.step()
    assert engine.running == 0 and len(running[0].events) == events


def test_a_failed_step_leaves_a_usable_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODELS["gpt"](), TOKENIZER, CPU, prefix_megabytes=1)
    prompt = [TOKENIZER.bos, 5, 6]
    expected = engine.generate([prompt], max_tokens=9, seed=3)
    with monkeypatch.context() as broken:
        broken.setattr(type(engine.model), "logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([prompt], max_tokens=9, seed=3)
    assert engine.running == 0
    assert engine.generate([prompt], max_tokens=9, seed=3) == expected
    lost = engine.events([prompt], max_tokens=9, seed=3, **{**NO_END, "logprobs": 0})
    next(iter(lost))
    engine.reset()
    list(lost)  # ends, although its rows are gone


@pytest.mark.parametrize(("budget", "answering"), [(8, [2, 3, 4, 5]), (16, [3, 5, 5, 5]), (64, [5, 5, 5, 5])])
def test_a_burst_of_prompts_is_read_whole_in_the_order_of_arrival(budget: int, answering: list[int]) -> None:
    """The first of four prompts of eight tokens does not wait for the last one."""
    engine = Engine(MODELS["gpt"](), TOKENIZER, CPU)
    engine.submit([[TOKENIZER.bos]], max_tokens=60, **NO_END)
    engine.step(budget)
    late = [engine.submit([[TOKENIZER.bos, number] + [5] * 6], max_tokens=9, **NO_END) for number in range(4)]
    found = []
    for _ in range(4):
        engine.step(budget)
        found.append(len(engine.batch))
        assert [row.generation for row in engine.batch.rows][1:] == late[: found[-1] - 1]
    assert found == answering and all(one.unfinished for one in late)
