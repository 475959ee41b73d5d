"""Small random models and a small tokenizer, shared by the tests of generation and of the server."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from quern.generate.engine import Engine
from quern.model.gpt import GPT
from quern.model.unet import UNet
from quern.recipe import ResolvedModel
from quern.text.tokenizer import Tokenizer
from tests.support.models import CPU, randomized

SENTENCES = (
    "The miller grinds the grain at dawn, and the stone hums.",
    "What is 123 + 456? It is 579, says the baker.",
    "Grüße aus Köln! Ça va? 你好，世界。 Привет, мир. 👋🏽 😀",
    "stop there, please; the end is near. END",
)


@cache
def toy_tokenizer() -> Tokenizer:
    return Tokenizer.train(SENTENCES * 8, 330)


def toy_model(
    windows: str = "SSSL",
    *,
    depth: int = 4,
    heads: int = 4,
    kv_heads: int = 4,
    context: int = 32,
    vocab_size: int = 96,
    seed: int = 0,
    window: int | None = None,
    make_model: Callable[[ResolvedModel], Any] = GPT,
    key_offset: bool = False,
    bigrams: bool = False,
) -> Any:
    """A model with every parameter random: no path through it is silent. `window` replaces the short one."""
    recipe = ResolvedModel(
        depth=depth, width=8 * heads, head_dim=8, heads=heads, kv_heads=kv_heads, context=context,
        vocab_size=vocab_size, windows=windows, key_offset=key_offset, bigrams=bigrams,
        rope_base=1024.0 if key_offset else 100_000.0,
    )  # fmt: skip
    model = make_model(recipe)
    # The last layer is long in every recipe; here the letters are taken at their word.
    kinds = [windows[layer % len(windows)] for layer in range(depth)]
    model.windows = [(window or context // 4) if kind == "S" else None for kind in kinds]
    return randomized(model, seed=seed)


class SmallUNet(UNet):
    """Windows that a prompt outgrows."""

    window_block = 4
    long_window = 12


def toy_unet(*, context: int, vocab_size: int, bos: int, depth: int = 6) -> Any:
    shape = ResolvedModel(
        depth=depth, width=32, head_dim=8, heads=4, kv_heads=4, context=context, vocab_size=vocab_size, bos=bos,
        windows="LSSSLSSLSSSL", rope_base=1024.0,
    )  # fmt: skip
    model = randomized(SmallUNet(shape), seed=0)
    with torch.no_grad():
        model.head.weight.mul_(6)  # logits spread by about 1, whatever the sigmoid divides by
    return model


class Hooked(Engine):
    """An engine with the model of another one, which calls a function before each step."""

    def __init__(self, other: Engine, before: Callable[[], object]) -> None:
        super().__init__(other.model, other.tokenizer, other.machine, other.max_rows)
        self._before = before

    def step(self, most: int | None = None) -> None:
        self._before()
        super().step(most)


def toy_engine(*, context: int = 64, seed: int = 0, max_rows: int = 64, prefix_megabytes: float = 0) -> Engine:
    tokenizer = toy_tokenizer()
    model = toy_model(context=context, vocab_size=tokenizer.vocab_size, seed=seed)
    return Engine(model, tokenizer, CPU, max_rows, prefix_megabytes)
