"""The text that benchmarks read: the built-in world, or documents of one's own. It measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from quern.data.loader import Batch
from quern.machine import Machine
from quern.model.gpt import GPT
from quern.optim.groups import table
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import ModelRecipe, Recipe, TrainRecipe
from quern.resolve import resolve
from quern.text.documents import read
from quern.text.tinyworld import corpus
from quern.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from quern.train.state import build_model


@dataclass(frozen=True)
class Material:
    """The text that is measured on: the built-in world, or the documents of `data`; made when first asked
    for."""

    seed: int
    megabytes: float
    vocab_size: int
    data: Path | None = None

    @cached_property
    def texts(self) -> list[str]:
        """Documents of at least `megabytes` in all, or everything there is."""
        if self.data is None:
            return list(corpus.documents(self.seed, self.megabytes))
        return list(_up_to((text for text, _ in read(self.data)), self.megabytes * 1e6))

    @cached_property
    def bytes(self) -> int:
        return sum(len(text.encode("utf-8", "replace")) for text in self.texts)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.train(self.texts, self.vocab_size)

    @property
    def name(self) -> str:
        return "tinyworld" if self.data is None else self.data.name


def _up_to(texts: Iterator[str], size: float) -> Iterator[str]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


MICRO_BATCH_TOKENS = 4096


def reference(quick: bool, seed: int, batch_tokens: int = MICRO_BATCH_TOKENS) -> Recipe:
    """The reference recipe, resolved; quick: a tiny one."""
    if quick:
        model = ModelRecipe(width=32, heads=2, head_dim=16, vocab_size=512, context=64, windows="L")
        depth, batch_tokens, micro = 2, 128, 128
    else:
        model = ModelRecipe(width=256, heads=4, vocab_size=8192, context=512, windows="L")
        depth, micro = 4, min(batch_tokens, MICRO_BATCH_TOKENS)
    train = TrainRecipe(batch_tokens=batch_tokens, micro_batch_tokens=micro, steps=1000)
    recipe = Recipe(
        name="reference",
        make_model=GPT,
        make_rules=table,
        make_schedule=warmup_stable_decay,
        depth=depth,
        seed=seed,
        model=model,
        train=train,
    )
    return resolve(recipe)


def left_to_itself(recipe: Recipe) -> Recipe:
    """The recipe with the batch and the steps that it picks for the horizon of its size."""
    micro = recipe.train.micro_batch_tokens
    return resolve(replace(recipe, train=TrainRecipe(micro_batch_tokens=micro)))


def random_batch(recipe: Recipe, seed: int) -> Batch:
    """A global batch of random tokens, every target counted."""
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    assert context and batch_tokens and recipe.model.vocab_size
    numbers = torch.Generator().manual_seed(seed)
    rows = max(1, batch_tokens // context)
    row_tokens = torch.randint(recipe.model.vocab_size, (rows, context + 1), generator=numbers, dtype=torch.int32)
    tokens, targets = row_tokens[:, :-1].contiguous().numpy(), row_tokens[:, 1:].contiguous().numpy()
    return Batch(tokens, targets, targets >= 0)


def pair_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of that size without training: the bytes, and as many pairs of bytes as there is room
    for."""
    room = vocab_size - 256 - len(SPECIAL_TOKENS)
    return Tokenizer([bytes([i // 256, i % 256]) for i in range(room)])


@torch.no_grad()
def talking_model(recipe: Recipe, tokenizer: Tokenizer, machine: Machine) -> GPT:
    """A random model that never says a special token: no reply ends early, and none calls a tool.

    Its logits spread over the whole softcap, and those of the special tokens are zero, so that one of them
    is drawn about once in a million tokens.
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
