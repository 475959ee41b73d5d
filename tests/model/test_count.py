"""What a recipe's model costs, against real models, torch's own FLOP counter and a real cache."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quern.generate.cache import KVCache
from quern.model.context import CausalContext
from quern.model.count import flops_per_token, kv_bytes_per_token, parameters
from quern.model.gpt import GPT
from quern.recipe import ModelRecipe, Recipe, TextRecipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve

SMALL = ModelRecipe(depth=3, width=48, head_dim=8, heads=6, kv_heads=2, context=32, vocab_size=101)
REFERENCE = ModelRecipe(depth=4, width=256, head_dim=64, heads=4, kv_heads=4, context=512, vocab_size=8192, windows="L")


def of(shape: ModelRecipe, make_model: Callable[..., Any] = GPT) -> Recipe:
    return replace(RECIPE, make_model=make_model, model=shape)


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, depth=1, kv_heads=6), replace(SMALL, depth=4, width=64)])
def test_parameters_are_a_real_models(shape: ModelRecipe) -> None:
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


def test_counting_allocates_nothing() -> None:
    huge = replace(REFERENCE, depth=96, width=12_288, heads=96, kv_heads=96, head_dim=128, vocab_size=50_257)
    assert parameters(of(huge)).transformer == 12 * 96 * 12_288**2  # 348 GB if it were made


def test_the_reference_size_is_37_7_megaflop_a_token() -> None:
    # 6 · (12 · 4 · 256² + 8192 · 256) + 12 · 4 layers · 4 heads · 64 · 512
    assert flops_per_token(of(REFERENCE)) == 37_748_736


def test_windows_count_what_they_see() -> None:
    full = flops_per_token(of(REFERENCE))
    windowed = flops_per_token(of(replace(REFERENCE, windows="SSSL")))
    assert full - windowed == 12 * 3 * 256 * (512 - 128)
    # Queries set the cost of attention; fewer keys and values make their two matrices smaller.
    assert full - flops_per_token(of(replace(REFERENCE, kv_heads=1))) == 6 * 4 * 2 * 256 * 192


def test_matmuls_are_what_torch_counts() -> None:
    """Forward is two FLOPs per matmul parameter and token; torch's counter sees no custom operator, so no
    attention, and it does see the two small gates."""
    model = GPT(SMALL)
    model.initialize(0)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(torch.zeros(2, 32, dtype=torch.long), CausalContext()))
    gates = sum(p.numel() for name, p in model.named_parameters() if "gate" in name)
    assert counter.get_total_flops() == 2 * 64 * (parameters(of(SMALL)).kaplan + gates)
    attention = 12 * 48 * (8 + 8 + 32)
    assert flops_per_token(of(SMALL)) == 6 * parameters(of(SMALL)).kaplan + attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_are_a_real_caches(dtype: torch.dtype) -> None:
    model = GPT(replace(SMALL, windows="L")).to(dtype)

    def size(tokens: int) -> int:
        cache = KVCache.for_model(model, rows=1, max_tokens=tokens)
        return sum(t.numel() * t.element_size() for t in (*cache.keys_BKRE, *cache.values_BKRE))

    assert size(128) - size(64) == 64 * kv_bytes_per_token(of(SMALL), dtype)
    assert kv_bytes_per_token(of(SMALL), dtype) == 2 * 3 * 2 * 8 * dtype.itemsize


class Skipping(GPT):
    """The middle layer does not attend."""

    def __init__(self, shape: ModelRecipe) -> None:
        super().__init__(shape)
        self.attention_layers = [0, 2]


def test_a_layer_that_does_not_attend_costs_no_attention_and_no_cache() -> None:
    all_layers, skipping = of(SMALL), of(SMALL, Skipping)
    assert flops_per_token(all_layers) - flops_per_token(skipping) == 12 * 48 * 8  # its window is a quarter of 32
    ratio = kv_bytes_per_token(all_layers, torch.float32) / kv_bytes_per_token(skipping, torch.float32)
    assert ratio == pytest.approx(3 / 2)
    cache = KVCache.for_model(Skipping(SMALL), rows=2, max_tokens=20)
    assert [keys.size(2) for keys in cache.keys_BKRE] == [8, 0, 20]


def test_a_group_without_a_kind_is_named() -> None:
    class Novel(GPT):
        group_kinds = {name: kind for name, kind in GPT.group_kinds.items() if name != "smear"}

    with pytest.raises(ValueError, match="Novel counts its parameters 'smear' as None: give them one of embedding"):
        parameters(of(SMALL, Novel))


def test_default_horizon_follows_the_counts() -> None:
    """12 tokens for each parameter of the matrices and the head."""
    recipe = resolve(replace(RECIPE, depth=6, text=TextRecipe(vocab_size=8192), train=TrainRecipe(horizon_ratio=12.0)))
    assert recipe.train.steps and recipe.train.batch_tokens
    horizon = recipe.train.steps * recipe.train.batch_tokens
    assert horizon == pytest.approx(12 * parameters(recipe).kaplan, rel=0.01)
