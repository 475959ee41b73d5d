"""Models of the benchmarks: the reference model, its training, and an engine whose replies never end early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.benchmark.utils.timer import timer

from quern.bench.batches import random_batch
from quern.data.batch import Batch
from quern.generate.engine import Engine
from quern.machine import Machine
from quern.optim.schedule import Multipliers
from quern.recipe import ModelRecipe, Resolved, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import MICRO_BATCH_TOKENS, resolve
from quern.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from quern.train.state import TrainState, build_model, build_state, compile_model
from quern.train.step import train_step


def reference(quick: bool, seed: int, batch_tokens: int = MICRO_BATCH_TOKENS) -> Resolved:
    """Returns the resolved reference recipe, or a tiny one. batch_tokens: of a step, in micro-batches of at most
    4,096."""
    if quick:
        model = ModelRecipe(width=32, heads=2, head_dim=16, vocab_size=512, context=64, windows="L")
        depth, batch_tokens, micro = 2, 128, 128
    else:
        model = ModelRecipe(width=256, heads=4, vocab_size=8192, context=512, windows="L")
        depth, micro = 4, min(batch_tokens, MICRO_BATCH_TOKENS)
    train = TrainRecipe(batch_tokens=batch_tokens, micro_batch_tokens=micro, steps=1000)
    return resolve(replace(RECIPE, name="reference", depth=depth, seed=seed, model=model, train=train))


def left_to_itself(recipe: Resolved) -> Resolved:
    """Returns the recipe with the batch size and the steps that it derives from its model."""
    return resolve(replace(recipe, train=TrainRecipe(micro_batch_tokens=recipe.train.micro_batch_tokens)))


def sizes_of(recipe: Resolved) -> dict[str, Any]:
    """Returns the sizes of a resolved recipe for a record."""
    shape = recipe.model
    sizes = {"layers": shape.depth, "width": shape.width, "heads": shape.heads, "vocabulary": shape.vocab_size}
    return sizes | {"context": shape.context, "windows": shape.windows, "batch_tokens": recipe.train.batch_tokens}


def training_state(recipe: Resolved, machine: Machine) -> TrainState:
    """Returns a new model and optimizer; the model is compiled where the machine compiles."""
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed))
    compile_model(state.model, machine)
    return state


def take_step(state: TrainState, recipe: Resolved, machine: Machine, batch: Batch | None = None) -> tuple[float, float]:
    """Takes one optimizer step on a global batch, by default a random one. Returns its wall-clock seconds and its loss.
    Raises RuntimeError if the loss or the gradient is not finite."""
    batch, start = batch or random_batch(recipe, state.step), timer()
    result = train_step(state, batch, Multipliers(), machine, micro_batch_rows=recipe.micro_batch_rows)
    seconds = timer() - start
    if result.verdict != "step":
        norm = f"loss {result.loss}, gradient norm {result.grad_norm}"
        raise RuntimeError(f"a step of the benchmark was not finite ({norm}), so its time means nothing: report it")
    return seconds, result.loss


def pair_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns an untrained tokenizer of that size: the bytes, and pairs of bytes."""
    room = vocab_size - 256 - len(SPECIAL_TOKENS)
    return Tokenizer([bytes([i // 256, i % 256]) for i in range(room)])


@torch.no_grad()
def talking_engine(recipe: Resolved, machine: Machine, prefix_megabytes: float = 0) -> Engine:
    """Returns an engine with a random model whose replies never end early or call a tool: the logits spread over the
    whole softcap, and those of the special tokens are zero, so that it draws one of them about once in a million
    tokens."""
    tokenizer = pair_tokenizer(recipe.model.vocab_size)
    model = build_model(recipe, machine, recipe.seed)
    numbers = machine.generator(recipe.seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * parameter.size(-1) ** -0.5)
    model.head.weight.mul_(model.head.weight.size(-1) ** 0.5)
    model.head.weight[list(tokenizer.special_ids.values())] = 0
    return Engine(model.eval(), tokenizer, machine, prefix_megabytes=prefix_megabytes)
