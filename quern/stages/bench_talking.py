"""A model that talks without having learned to, and its tokenizer: what benchmarks of generation need."""

from __future__ import annotations

import torch

from quern.machine import Machine
from quern.model.gpt import GPT
from quern.recipe import Recipe
from quern.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from quern.train.state import build_model


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
