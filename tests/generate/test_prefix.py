"""What the prefix cache finds, against a search through everything that was added."""

import random
from types import SimpleNamespace
from typing import Any, cast

import torch

from quern.generate.cache import LEAST_TOKENS, KVCache, PrefixCache


def test_the_longest_beginning_is_found_and_the_least_recently_used_leave() -> None:
    numbers, logits = random.Random(0), torch.zeros(1)
    cache, order = PrefixCache(40 * 1000), cast(list[tuple[int, ...]], [])
    known: dict[tuple[int, ...], bool] = {}
    opening = [[numbers.randrange(3) for _ in range(LEAST_TOKENS)] for _ in range(4)]
    found = parted = 0
    for _ in range(1500):
        base = list(numbers.choice(order)) if order and numbers.random() < 0.6 else list(numbers.choice(opening))
        tokens = base[: numbers.randrange(1, len(base) + 1)] + [
            numbers.randrange(3) for _ in range(numbers.randrange(9))
        ]
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
        if cache.wants(tokens, whole):
            state: Any = SimpleNamespace(bytes=1000 - 4 * whole)
            cache.add(tokens, cast(KVCache, state), logits if whole else None)
            order = [one for one in order if one != tuple(tokens)] + [tuple(tokens)]
            known[tuple(tokens)] = whole
            order = order[-40:]
        assert len(cache) == len(order)
    assert found > 100 and parted > 30 and cache.bytes == 40 * 1000
    cache.clear()
    assert cache.find(list(order[-1]) + [0]) is None and len(cache) == 0
