"""Inputs of the benchmarks: text, the reference model, random batches, and a model whose replies never end early.

The text is the built-in world or the documents of `--data`. The reference model is the `gpt` recipe with 4 layers,
width 256, vocabulary 8,192, context 512 and full windows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from quern.data.batch import Batch
from quern.machine import Machine
from quern.model.gpt import GPT
from quern.optim.schedule import Multipliers
from quern.recipe import ModelRecipe, Recipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.text.documents import read
from quern.text.tinyworld import corpus
from quern.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from quern.train.state import TrainState, build_model, build_state, compile_model
from quern.train.step import train_step

MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Material:
    """The text to measure on, made at first use: the built-in world, or the documents of `data`."""

    seed: int
    megabytes: float
    vocab_size: int
    data: Path | None = None

    @cached_property
    def texts(self) -> list[str]:
        """Documents of `megabytes` in all, or all documents of a smaller source."""
        if self.data is None:
            return list(corpus.documents(self.seed, self.megabytes))
        texts: list[str] = []
        size = 0
        for text, _ in read(self.data):
            texts.append(text)
            size += len(text)
            if size >= self.megabytes * 1e6:
                break
        return texts

    @cached_property
    def bytes(self) -> int:
        return sum(len(text.encode("utf-8", "replace")) for text in self.texts)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.train(self.texts, self.vocab_size)

    @property
    def name(self) -> str:
        return "tinyworld" if self.data is None else self.data.name


def reference(quick: bool, seed: int, batch_tokens: int = MICRO_BATCH_TOKENS) -> Recipe:
    """Returns the resolved reference recipe, or a tiny one.

    Args:
        quick: Use tiny sizes, and 128 tokens a step.
        seed: The recipe's seed.
        batch_tokens: Tokens of an optimizer step, in micro-batches of at most 4,096.
    """
    if quick:
        model = ModelRecipe(width=32, heads=2, head_dim=16, vocab_size=512, context=64, windows="L")
        depth, batch_tokens, micro = 2, 128, 128
    else:
        model = ModelRecipe(width=256, heads=4, vocab_size=8192, context=512, windows="L")
        depth, micro = 4, min(batch_tokens, MICRO_BATCH_TOKENS)
    train = TrainRecipe(batch_tokens=batch_tokens, micro_batch_tokens=micro, steps=1000)
    return resolve(replace(RECIPE, name="reference", depth=depth, seed=seed, model=model, train=train))


def left_to_itself(recipe: Recipe) -> Recipe:
    """Returns the recipe with the batch size and the steps that it derives from its model."""
    return resolve(replace(recipe, train=TrainRecipe(micro_batch_tokens=recipe.train.micro_batch_tokens)))


def random_batch(recipe: Recipe, seed: int) -> Batch:
    """Returns a global batch of random tokens, in which every target counts."""
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    assert context and batch_tokens and recipe.model.vocab_size
    numbers = torch.Generator().manual_seed(seed)
    rows = max(1, batch_tokens // context)
    row_tokens = torch.randint(recipe.model.vocab_size, (rows, context + 1), generator=numbers, dtype=torch.int32)
    tokens, targets = row_tokens[:, :-1].contiguous().numpy(), row_tokens[:, 1:].contiguous().numpy()
    return Batch(tokens, targets, targets >= 0)


def training_state(recipe: Recipe, machine: Machine) -> TrainState:
    """Returns a new model and optimizer; the model is compiled where the machine compiles."""
    state = build_state(recipe, machine, build_model(recipe, machine, recipe.seed))
    compile_model(state.model, machine)
    return state


def take_step(
    state: TrainState, batch: Batch, recipe: Recipe, machine: Machine, multipliers: Multipliers | None = None
) -> tuple[float, float]:
    """Takes one optimizer step: forward, loss, backward, gradient norm, update.

    Returns:
        Its wall-clock seconds and its loss.

    Raises:
        RuntimeError: The step was skipped, because its loss or gradient is not finite.
    """
    rows = recipe.micro_batch_rows
    machine.synchronize()
    start = time.perf_counter()
    result = train_step(state, batch, multipliers or Multipliers(), machine, micro_batch_rows=rows)
    machine.synchronize()
    seconds = time.perf_counter() - start
    if result.verdict != "step":
        norm = f"loss {result.loss}, gradient norm {result.grad_norm}"
        raise RuntimeError(f"a step of the benchmark was not finite ({norm}), so its time means nothing: report it")
    return seconds, result.loss


def pair_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns an untrained tokenizer of that size: the bytes, and pairs of bytes."""
    room = vocab_size - 256 - len(SPECIAL_TOKENS)
    return Tokenizer([bytes([i // 256, i % 256]) for i in range(room)])


@torch.no_grad()
def talking_model(recipe: Recipe, tokenizer: Tokenizer, machine: Machine) -> GPT:
    """Returns a random model that never says a special token: no reply ends early, and none calls a tool.

    The logits spread over the whole softcap, and those of the special tokens are zero: the model draws one of them
    about once in a million tokens.
    """
    model = build_model(recipe, machine, recipe.seed)
    numbers = machine.generator(recipe.seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            values = torch.empty(parameter.shape).normal_(0.0, parameter.size(-1) ** -0.5, generator=numbers)
            parameter.copy_(values)
    model.head.weight.mul_(model.head.weight.size(-1) ** 0.5)
    model.head.weight[list(tokenizer.special_ids.values())] = 0
    return model.eval()
