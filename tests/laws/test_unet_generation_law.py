"""Cached = uncached for the speedrun model: a layer without attention, windows, a scale of its own, value embeddings.

The oracle is the model over whole rows in the context it makes for them, run again for every token. Logits within
1e-5 in fp32, greedy tokens equal.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quern.generate.cache import KVCache, decode, pad
from quern.model.unet import UNet
from quern.recipe import ResolvedModel

BAR = 1e-5
BOS, VOCABULARY, CONTEXT = 0, 128, 40
LENGTHS = (1, 2, 7, 8, 9, 17, 24)
SHAPE = ResolvedModel(
    depth=6, width=32, head_dim=8, heads=4, kv_heads=4, context=CONTEXT, vocab_size=VOCABULARY, bos=BOS,
    windows="LSSSLSSLSSSL", rope_base=1024.0,
)  # fmt: skip


class Small(UNet):
    """Windows that a prompt outgrows."""

    window_block = 4
    long_window = 12


class Off(Small):
    """Attention scaled as the cache would scale it by itself."""

    def forward(self, tokens_BT: torch.Tensor, context: object) -> torch.Tensor:
        return super().forward(tokens_BT, Unscaled(context))  # pyright: ignore[reportArgumentType]


class Unscaled:
    def __init__(self, context: object) -> None:
        self._context = context

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)

    def attend(self, *args: object) -> torch.Tensor:
        # Only single tokens, so that reading the prompt stays right.
        context: object = self._context
        scale = args[5] if args[1].size(1) > 1 else None  # pyright: ignore[reportAttributeAccessIssue]
        return context.attend(*args[:5], scale)  # pyright: ignore[reportAttributeAccessIssue]


def build(depth: int, kind: type[UNet] = Small) -> UNet:
    model = kind(replace(SHAPE, depth=depth))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            scale = p.size(-1) ** -0.5 if p.dim() > 1 else 0.5
            p.copy_(scale * torch.randn(p.shape, generator=generator))
        model.head.weight.mul_(6)  # logits spread by about 1, whatever the sigmoid divides by
    return model.eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [[BOS, *torch.randint(1, VOCABULARY, (n - 1,), generator=generator).tolist()] for n in LENGTHS]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token but BOS, which would begin another document: that is not what is compared here."""
    return logits[..., BOS + 1 :].argmax(-1) + BOS + 1


@torch.inference_mode()
def deviation(model: UNet, steps: int = 11, chunk: int | None = None, oracle: UNet | None = None) -> float:
    """Largest difference of a logit between the two ways; infinite if a greedy token differs."""
    oracle = oracle or model
    cache = KVCache(model, len(LENGTHS), CONTEXT + 1)
    tokens_BT, lengths_B = pad(prompts(), BOS, torch.device("cpu"))
    chunk = chunk or tokens_BT.size(1)
    x_BD = torch.zeros(len(LENGTHS), 32)
    for start in range(0, tokens_BT.size(1), chunk):
        piece_B = (lengths_B - start).clamp(0, chunk)
        x_BD = torch.where(
            piece_B[:, None] > 0, cache.prefill(model, tokens_BT[:, start : start + chunk], piece_B), x_BD
        )
    logits = [model.logits(x_BD)]
    for _ in range(steps - 1):
        logits.append(decode(model, cache, greedy(logits[-1]), torch.arange(CONTEXT + 1)))
    found_BNV, worst = torch.stack(logits, dim=1), 0.0
    for row, ids in enumerate(prompts()):
        for step in range(steps):
            whole = torch.tensor([ids])
            expected_V = oracle.logits(oracle(whole, oracle.context(whole)))[0, -1]
            worst = max(worst, float((found_BNV[row, step] - expected_V).abs().max()))
            ids.append(int(greedy(expected_V)))
            if ids[-1] != int(greedy(found_BNV[row, step])):
                return float("inf")
    return worst


@pytest.mark.parametrize("depth", [2, 4, 6])
def test_cached_is_uncached(depth: int, law: Callable[..., None]) -> None:
    found = deviation(build(depth))
    law("cached = uncached, unet: logits, fp32; greedy tokens equal", found, "≤ 1e-5")
    assert found <= BAR


@pytest.mark.parametrize("chunk", [1, 3, 13])
def test_prefill_in_pieces_is_prefill_at_once(chunk: int, law: Callable[..., None]) -> None:
    found = deviation(build(6), steps=4, chunk=chunk)
    law("prefill in pieces = at once, unet: logits, fp32; greedy tokens equal", found, "≤ 1e-5")
    assert found <= BAR


def test_the_comparison_notices_a_forgotten_scale_and_a_window() -> None:
    assert deviation(build(6, Off), oracle=build(6)) > 1e-3

    class Wider(Small):
        long_window = 16

    assert deviation(build(6, Wider), oracle=build(6)) > 1e-3
