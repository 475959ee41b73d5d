"""Section of `quern bench gpu` about decoding: tokens/s, and the share of the memory's bandwidth that a step uses.

A step of decoding must read every weight of the matrices and the head once, and the keys and values of every row; that
over the bandwidth of a large copy is the least time it can take. The model is the one that training is measured on,
with random weights, after prompts of 512 tokens. Two ways: the compiled step as the engine calls it, and the same step
captured as a CUDA graph, which leaves out what launching its kernels costs. Sampling is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quern.bench.gpu.setup import Bench, timed
from quern.bench.gpu.train import recipe_of
from quern.bench.record import Measure, rates
from quern.generate.cache import KVCache, decode
from quern.generate.compiled import SPAN, CompiledDecode
from quern.model.count import parameters
from quern.recipe import Recipe
from quern.train.state import build_model

ROWS = (1, 8, 64)
PROMPT_TOKENS = 512

Step = Callable[[], object]


def decoding(bench: Bench) -> Iterator[Measure]:
    """At batch 1, 8 and 64."""
    recipe = recipe_of(bench, 512 if bench.quick else 32_768, 1)
    model = build_model(recipe, bench.machine, recipe.seed).eval()
    assert recipe.model.context
    compiled = CompiledDecode(model, recipe.model.context) if bench.machine.compile else None
    for rows in ROWS[:2] if bench.quick else ROWS:
        bench.check_time()
        with torch.inference_mode():
            yield from _at(bench, recipe, model, compiled, rows)


def _at(bench: Bench, recipe: Recipe, model: Any, compiled: CompiledDecode | None, rows: int) -> Iterator[Measure]:
    prompt = 16 if bench.quick else PROMPT_TOKENS
    if compiled is not None:
        compiled.warm_up(rows)
    capacity = (recipe.model.context or 0) if compiled is None else compiled.max_tokens
    cache = KVCache.for_model(model, rows, capacity)
    device = bench.machine.device
    numbers = torch.Generator().manual_seed(bench.seed)
    tokens = torch.randint(model.embedding.num_embeddings, (rows, prompt), generator=numbers).to(device)
    cache.prefill(model, tokens, torch.full((rows,), prompt, device=device), bench.machine.attention)
    slots_S = torch.arange(min(capacity, prompt + SPAN), device=device)
    fixed = cache.positions_B.clone()  # each step starts from here: what it costs doesn't drift
    tokens_B = tokens[:, 0].contiguous()

    def step() -> Tensor:
        cache.positions_B.copy_(fixed)
        if compiled is None:
            return decode(model, cache, tokens_B, slots_S)
        return compiled(cache, tokens_B, slots_S)

    ways: dict[str, Step] = {"eager" if compiled is None else "compiled": step}
    if device.type == "cuda":
        captured = _captured(bench, step, rows)
        ways |= {"compiled, CUDA graph": captured} if captured is not None else {}
    moved = bytes_of_a_step(recipe, cache, rows, prompt + 1)
    for name, seconds in bench.rounds({name: timed(way) for name, way in ways.items()}).items():
        share = tuple(100 * moved / one / bench.limits.bytes_per_second for one in seconds)
        yield Measure(f"batch {rows}, {name}: speed", "tokens/s", rates(rows, seconds))
        yield Measure(f"batch {rows}, {name}: of the bandwidth", "%", share, f"{moved / 1e6:,.0f} MB a step")


def _captured(bench: Bench, step: Step, rows: int) -> Step | None:
    """The step as a CUDA graph; None, and a note, where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        bench.problems.append(f"batch {rows}: no CUDA graph of the step ({str(error).splitlines()[0][:150]})")
        return None
    return graph.replay


def bytes_of_a_step(recipe: Recipe, cache: KVCache, rows: int, seen: int) -> int:
    """Weights that are multiplied with every token, once, and the keys and values that each row's query sees."""
    item = cache.last_BD.element_size()
    shape = recipe.model
    assert shape.kv_heads and shape.head_dim
    slots = sum(min(ring, seen) for ring in cache.rings if ring)
    return item * (parameters(recipe).kaplan + rows * 2 * slots * shape.kv_heads * shape.head_dim)
