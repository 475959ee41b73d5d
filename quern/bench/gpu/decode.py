"""Section of `quern bench gpu` about decoding: tokens/s, and the share of the memory bandwidth that a step uses.

A decoding step must read each weight of the matrices and the head once, and the keys and values of each row. Its least
time is these bytes over the bandwidth of a large copy. The model is that of the training section, with random weights,
after prompts of 512 tokens. Two ways: the compiled step as the engine calls it, and the same step as a CUDA graph.
Sampling is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quern.bench.gpu.setup import GpuBench
from quern.bench.gpu.train import recipe_of
from quern.bench.measure import Figure, figure
from quern.generate.cache import KVCache, decode
from quern.generate.compiled import SPAN, CompiledDecode
from quern.model.count import parameters
from quern.recipe import Resolved
from quern.train.state import build_model

ROWS = (1, 8, 64)
PROMPT_TOKENS = 512


@torch.inference_mode()
def decoding(bench: GpuBench) -> Iterator[Figure]:
    """Speed and share of the bandwidth at batch 1, 8 and 64."""
    recipe, machine, prompt = recipe_of(bench, 1), bench.machine, 16 if bench.quick else PROMPT_TOKENS
    model = build_model(recipe, machine, recipe.seed).eval()
    step, capacity, way = partial(decode, model), recipe.model.context, "eager"
    if machine.compile:
        step = compiled = CompiledDecode(model, capacity)
        capacity, way = compiled.max_tokens, "compiled"
    for rows in ROWS[:2] if bench.quick else ROWS:
        bench.check_time()
        if machine.compile:
            compiled.warm_up(rows)
        cache = KVCache(model, rows, capacity)
        numbers = torch.Generator().manual_seed(bench.seed)
        tokens = torch.randint(model.embedding.num_embeddings, (rows, prompt), generator=numbers).to(machine.device)
        cache.prefill(model, tokens, torch.full((rows,), prompt, device=machine.device), machine.attention)
        slots_S = torch.arange(min(capacity, prompt + SPAN), device=machine.device)
        arguments = cache, cache.positions_B.clone(), tokens[:, 0].contiguous(), slots_S
        once, place = partial(_one_token, step, *arguments), f"batch {rows}, {way}"
        taken = bench.seconds({place: once})
        if bench.on_gpu:
            taken |= bench.seconds({f"{place}, CUDA graph": once}, graph=True)
        moved = bytes_of_a_step(recipe, cache, rows, prompt + 1)
        for name, seconds in taken.items():
            share = 100 * moved / bench.limits.bytes_per_second / seconds
            yield figure(f"{name}: speed", "tokens/s", rows / seconds)
            yield figure(f"{name}: of the bandwidth", "%", share, f"{moved / 1e6:,.0f} MB a step")


def _one_token(step: Callable[..., Any], cache: KVCache, positions_B: Tensor, *arguments: Tensor) -> object:
    """Decodes a token from the same positions at each call, so that its cost stays equal."""
    cache.positions_B.copy_(positions_B)
    return step(cache, *arguments)


def bytes_of_a_step(recipe: Resolved, cache: KVCache, rows: int, seen: int) -> int:
    """Returns the bytes of the weights that multiply each token, and of the keys and values that each query sees."""
    shape = recipe.model
    slots = sum(min(ring, seen) for ring in cache.rings if ring)
    values = parameters(recipe).kaplan + rows * 2 * slots * shape.kv_heads * shape.head_dim
    return cache.keys_BKRE[0].element_size() * values
