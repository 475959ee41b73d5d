"""The engine as its callers use it: limits and errors, tools inside a batch, seeds, streaming, cancelling."""

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quern.generate.cache import LEAST_TOKENS, KVCache, PrefixCache
from quern.generate.engine import SERVED_TOKENS, Engine
from quern.generate.sampling import GREEDY, Sampling
from quern.kernels.attention.attend import attend_plain, attend_sdpa
from quern.kernels.attention.autotune import Backend
from tests.support.toy_engine import CPU, toy_engine, toy_model, toy_tokenizer

TOKENIZER = toy_tokenizer()
BOS = TOKENIZER.bos


def scripted(follows: dict[int, int]) -> Any:
    """A toy model with which greedy decoding spells a script: after token a comes follows[a]."""
    model = toy_model(context=64, vocab_size=TOKENIZER.vocab_size)

    def spell(_: torch.nn.Module, given: tuple[torch.Tensor, Any], x_BTD: torch.Tensor) -> torch.Tensor:
        nexts = torch.tensor([follows.get(int(token), 0) for token in given[0].flatten()]).view(given[0].shape)
        return nexts[..., None].float().expand_as(x_BTD)

    model.register_forward_hook(spell)
    model.logits = lambda x_BD: torch.nn.functional.one_hot(x_BD[..., 0].long(), TOKENIZER.vocab_size).float()
    return model


def test_a_reply_ends_at_max_tokens_or_where_the_context_ends() -> None:
    engine = toy_engine(context=32)
    [[short]] = engine.generate([[BOS, 5]], max_tokens=3, sampling=GREEDY)
    assert len(short.ids) == 3 and short.finish_reason == "length" and short.prompt_tokens == 2
    [[long]] = engine.generate([[BOS] * 30], max_tokens=100, sampling=GREEDY)
    assert len(long.ids) <= 2
    [[last]] = engine.generate([[BOS] * 31], max_tokens=100, sampling=GREEDY)
    assert len(last.ids) == 1


@pytest.mark.parametrize("path", [attend_plain, attend_sdpa])
def test_prompts_are_read_by_the_attention_that_the_machine_picked(path: Callable[..., torch.Tensor]) -> None:
    """Each windowed layer hands over its window and nothing dense; the replies are those of the usual path."""
    seen: list[int | torch.Tensor | None] = []

    def recording(*arguments: Any) -> torch.Tensor:
        seen.append(arguments[3].window)
        assert arguments[3].documents_BT is None
        return path(*arguments)

    usual = toy_engine(context=64)
    backend = Backend("recording", recording)
    machine = replace(CPU, attention=backend)
    prompts = [[BOS, *range(5, 45)], [BOS, 9]]
    found = Engine(usual.model, TOKENIZER, machine).generate(prompts, max_tokens=8, sampling=GREEDY)
    assert seen == usual.model.windows == [16, 16, 16, None]
    expected = usual.generate(prompts, max_tokens=8, sampling=GREEDY)
    assert [[reply.ids for reply in row] for row in found] == [[reply.ids for reply in row] for row in expected]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_tokens": 0}, "must be at least 1"),
        ({"stop": ("",)}, "stop string is empty"),
        ({"prompts": [[]]}, "begin it with the tokenizer's BOS"),
        ({"prompts": [[BOS], [BOS] * 32]}, "has 32 tokens and the model's context holds 32.* 31 tokens"),
        ({"prompts": [[BOS], [BOS] * 100]}, "has 100 tokens and the model's context holds 32.* 31 tokens"),
    ],
)
def test_senseless_arguments_and_long_prompts_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toy_engine(context=32).events(**{"prompts": [[BOS]], **arguments})  # before the first event: no header is sent


def test_a_text_to_score_may_fill_the_context() -> None:
    assert len(next(toy_engine(context=32).read([BOS] * 32))) == 31
    with pytest.raises(ValueError, match="the prompt has 33 tokens .* 32: shorten the prompt to 32 tokens"):
        next(toy_engine(context=32).read([BOS] * 33))


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        Engine(toy_model(vocab_size=96), TOKENIZER, CPU)


def test_a_vocabulary_padded_in_the_model_is_never_drawn_from() -> None:
    engine = Engine(toy_model(vocab_size=TOKENIZER.vocab_size + 500, context=64), TOKENIZER, CPU)
    [completions] = engine.generate([[BOS]], samples=20, max_tokens=20, sampling=Sampling(100.0))
    assert max(max(completion.ids) for completion in completions) < TOKENIZER.vocab_size


def test_tools_run_inside_a_batch_and_their_answers_are_forced() -> None:
    """A model that calls "1+2" after the letter c; its neighbours in the batch never call."""
    start, end = TOKENIZER.special("<|tool_start|>"), TOKENIZER.special("<|tool_end|>")
    out, done = TOKENIZER.special("<|output_end|>"), TOKENIZER.special("<|assistant_end|>")
    [one, plus, two, c, q, a] = [ord(letter) for letter in "1+2cqa"]
    script = {c: start, start: one, one: plus, plus: two, two: end, end: 99, out: q, q: done, a: a}
    engine = Engine(scripted(script), TOKENIZER, CPU)
    prompts = [[BOS, a], [BOS, BOS, BOS, c], [BOS, a]]
    [[first], [called], [last]] = engine.generate(prompts, max_tokens=15, sampling=GREEDY)
    assert called.parts == [
        {"type": "tool", "text": "1+2"},
        {"type": "output", "text": "3"},
        {"type": "text", "text": "q"},
    ]
    assert called.text == "q" and called.finish_reason == "stop"
    output = [TOKENIZER.special("<|output_start|>"), *TOKENIZER.encode("3"), out]
    assert called.ids == [start, one, plus, two, end, *output, q, done]
    assert first.text == last.text == "a" * 15 and first.finish_reason == "length"


def test_closing_the_events_stops_the_work() -> None:
    engine = toy_engine()
    events = engine.events([[BOS]], max_tokens=60)
    next(iter(events))
    events.close()  # type: ignore[attr-defined]
    rows: list[int] = []
    cast(torch.nn.Module, engine.model).register_forward_hook(lambda _, given, x_BTD: rows.append(len(x_BTD)))
    engine.generate([[BOS]], max_tokens=9)
    assert rows and set(rows) == {1}


def test_a_cancelled_prompt_is_read_no_further() -> None:
    engine = toy_engine(context=64, max_rows=2)
    long = {"bias": {TOKENIZER.special("<|assistant_end|>"): -100.0}, "max_tokens": 20}
    engine.events([[BOS, 65]], **long)
    engine.step(16)
    left = engine.submit([[BOS] * 40], **long)
    engine.step(16)
    assert engine.running == 2
    left.cancelled = True
    engine.step(16)
    assert engine.running == 1
    after = engine.submit([[BOS, 66]], max_tokens=1)
    engine.step(16)
    assert not left.events and not after.unfinished


def test_a_request_of_many_rows_leaves_seats_for_others() -> None:
    engine = toy_engine(context=64, max_rows=32)
    kept: dict[str, Any] = {"bias": {TOKENIZER.special("<|assistant_end|>"): -100.0}}
    prompts = [[BOS, 65], [BOS, 66], [BOS, 67]]
    many = [engine.submit([prompt], samples=40, max_tokens=20, **kept) for prompt in prompts[:2]]
    engine.step(SERVED_TOKENS)
    seats = [sum(row.generation is one for row in engine.batch.rows) for one in many]
    assert seats == [28, 3], "the second one has less, and still leaves a seat"
    late = engine.submit(prompts[2:], samples=1, max_tokens=3, **kept)
    for _ in range(3):
        engine.step(SERVED_TOKENS)
    assert not late.unfinished and all(one.unfinished == 40 for one in many)
    while any(one.unfinished for one in many):
        engine.step(SERVED_TOKENS)
    engine.submit(prompts[:1], samples=40, max_tokens=20)
    engine.step()
    assert engine.running == 32, "nobody watches: all seats are used"


def test_the_longest_beginning_is_found_and_the_least_recently_used_leave() -> None:
    numbers, logits = random.Random(0), torch.zeros(1)
    cache, order = PrefixCache(40 * 1000), cast(list[tuple[int, ...]], [])
    known: dict[tuple[int, ...], bool] = {}
    opening = [[numbers.randrange(3) for _ in range(LEAST_TOKENS)] for _ in range(4)]
    found = parted = 0
    for _ in range(1500):
        base = list(numbers.choice(order)) if order and numbers.random() < 0.6 else list(numbers.choice(opening))
        tokens = base[: numbers.randrange(1, len(base) + 1)]
        tokens += [numbers.randrange(3) for _ in range(numbers.randrange(9))]
        best = max(
            (one for one in order if tuple(tokens[: len(one)]) == one and (len(one) < len(tokens) or known[one])),
            key=len,
            default=None,
        )
        got = cache.find(tokens)
        assert (None if got is None else got.length) == (None if best is None else len(best))
        start = 0 if best is None else len(best)
        agreed = max((next((i for i, (a, b) in enumerate(zip(one, tokens, strict=False)) if a != b),
                           min(len(one), len(tokens))) for one in order), default=0)  # fmt: skip
        parts = agreed if start + LEAST_TOKENS <= agreed < len(tokens) else None
        assert cache.branch(tokens, start) == parts
        found, parted = found + (best is not None), parted + (parts is not None)
        if best is not None:
            order.append(order.pop(order.index(best)))
        whole = numbers.random() < 0.5
        state: Any = SimpleNamespace(bytes=1000 - 4 * whole)
        cache.keep(tokens, cast(KVCache, state), 0, logits if whole else None, alone=True)
        if len(tokens) >= LEAST_TOKENS and (tuple(tokens) not in order or (whole and not known[tuple(tokens)])):
            order = [one for one in order if one != tuple(tokens)] + [tuple(tokens)]
            known[tuple(tokens)] = whole
            order = order[-40:]
        assert len(cache) == len(order)
    assert found > 100 and parted > 30 and cache.bytes == 40 * 1000
