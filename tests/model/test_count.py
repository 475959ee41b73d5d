"""The costs of a recipe's model, against real models, sums by hand and a real cache."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quern.data.batch import Batch
from quern.generate.cache import KVCache
from quern.model.context import CausalContext
from quern.model.count import FlopCounter, flop_counter, kv_elements_per_token, parameters
from quern.model.gpt import GPT
from quern.recipe import Resolved, ResolvedModel
from quern.recipes.gpt import RECIPE

SMALL = ResolvedModel(
    depth=3, width=48, head_dim=8, heads=6, kv_heads=2, context=32, vocab_size=101, rope_base=100_000.0
)


def of(shape: ResolvedModel, make_model: Callable[..., Any] = GPT) -> Resolved:
    return Resolved.of(replace(RECIPE, make_model=make_model, model=shape))


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, depth=1, kv_heads=6), replace(SMALL, depth=4, width=64)])
def test_parameters_are_a_real_models(shape: ResolvedModel) -> None:
    model, counted = GPT(shape), parameters(of(shape))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert counted.total == sum(sizes.values())
    in_blocks = sum(n for name, n in sizes.items() if name.startswith("blocks") and "gate" not in name)
    assert counted.transformer == in_blocks
    assert counted.head == counted.embedding == 101 * (shape.width or 0)
    assert counted.kaplan == in_blocks + counted.head
    embeddings = sum(n for name, n in sizes.items() if name.startswith("value_embeddings"))
    assert counted.value_embeddings == embeddings > 0
    parts = counted.transformer + counted.embedding + counted.value_embeddings + counted.head + counted.scalars
    assert parts == counted.total


def a_batch(shape: ResolvedModel, rows: int = 3) -> Batch:
    assert shape.context
    tokens = np.random.default_rng(0).integers(0, 9, (rows, shape.context + 1), dtype=np.int32)
    return Batch.of_rows(tokens, np.zeros((rows, shape.context), bool))


def test_recipes_that_differ_in_no_product_are_counted_once() -> None:
    """A run, its resume and its lab's trials; other shapes, rules and rates have counters of their own."""
    recipe = of(SMALL)
    counter = flop_counter(recipe)
    assert flop_counter(replace(recipe, seed=7, train=replace(recipe.train, steps=7))) is counter
    rules = replace(recipe, make_rules=lambda r: recipe.make_rules(r))
    for other in (of(replace(SMALL, depth=1)), of(SMALL, Documents), rules):
        assert flop_counter(other) is not counter


def test_padding_is_computed_like_tokens() -> None:
    """A matrix product has 2 FLOPs for each weight and position forward, and 4 backward."""
    shape = replace(SMALL, depth=1)
    half = a_batch(shape)
    half.tokens[:, 16:], half.mask[:, :16] = 0, True
    full = replace(half, mask=np.ones_like(half.mask))
    counter = FlopCounter(of(shape))
    assert counter(half, 1.0).products == counter(full, 1.0).products > 3 * 32 * 6 * 48 * 101


class Documents(GPT):
    def context(self, tokens_BT: torch.Tensor, progress: float = 1.0) -> CausalContext:
        return CausalContext((tokens_BT == 0).cumsum(1, dtype=torch.int32), progress=progress)


class Changing(GPT):
    """A second product with the head during the middle of a run."""

    def loss(self, x_BTD: torch.Tensor, *others: Any) -> Any:
        total, losses = super().loss(x_BTD, *others)
        if 0.3 < others[-1].progress < 0.8:
            total = total + super().loss(x_BTD, *others)[0]
        return total, losses


def test_changes_during_a_run_are_found() -> None:
    counter, batch = FlopCounter(of(replace(SMALL, depth=1), Changing)), a_batch(SMALL)
    found = [counter(batch, step / 500).products for step in range(500)]
    head = 6 * 3 * 32 * 48 * 101
    assert set(np.subtract(found, found[0])) == {0, head}
    assert sum(np.subtract(found, found[0])) == pytest.approx(250 * head, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_are_a_real_caches(dtype: torch.dtype) -> None:
    model = GPT(replace(SMALL, windows="L")).to(dtype)

    def size(tokens: int) -> int:
        cache = KVCache(model, rows=1, max_tokens=tokens)
        return sum(t.numel() * t.element_size() for t in (*cache.keys_BKRE, *cache.values_BKRE))

    assert size(128) - size(64) == 64 * kv_elements_per_token(model) * dtype.itemsize
    assert kv_elements_per_token(model) == 2 * 3 * 2 * 8


class Skipping(GPT):
    """The middle layer does not attend."""

    def __init__(self, shape: ResolvedModel) -> None:
        super().__init__(shape)
        self.attention_layers = [0, 2]


def test_a_layer_that_does_not_attend_needs_no_cache() -> None:
    assert 2 * kv_elements_per_token(GPT(SMALL)) == 3 * kv_elements_per_token(Skipping(SMALL))
    cache = KVCache(Skipping(SMALL), rows=2, max_tokens=20)
    assert [keys.size(2) for keys in cache.keys_BKRE] == [8, 0, 20]


def test_a_group_without_a_kind_is_named() -> None:
    class Novel(GPT):
        group_kinds = {name: kind for name, kind in GPT.group_kinds.items() if name != "smear"}

    with pytest.raises(ValueError, match="Novel.group_kinds counts 'smear' as None: use embedding"):
        parameters(of(SMALL, Novel))
