"""Cached = uncached, batched = alone, prefill in pieces = whole, samples share a prefill, streamed = not; all models.

The oracle is the model over whole rows, in the context that it makes for them. Logits within 1e-5 in fp32, greedy
tokens equal. The last tests break the cache on purpose and require the same comparison to notice.
"""

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch

from quern.generate.cache import DecodeContext, KVCache, PrefillContext, decode, pad, take_token
from quern.generate.reply import Completion, Delta
from quern.generate.sampling import GREEDY, Sampling
from quern.model.base import LanguageModel
from quern.model.llama import Llama
from tests.laws.table import Law
from tests.support.toy_engine import toy_engine, toy_model, toy_unet

BAR = 1e-5
CONTEXT, VOCABULARY, BOS = 40, 128, 0


def toy(windows: str, **options: Any) -> Callable[[], LanguageModel]:
    return lambda: toy_model(windows, context=CONTEXT, vocab_size=VOCABULARY, **options)


def unet(depth: int) -> Callable[[], LanguageModel]:
    return lambda: toy_unet(context=CONTEXT, vocab_size=VOCABULARY, bos=BOS, depth=depth)


MODELS = {
    "S": toy("S"),
    "L": toy("L"),
    "SL": toy("SL"),
    "SSSL": toy("SSSL"),
    "window 1": toy("SSSL", window=1),
    "window 2": toy("SL", window=2),
    "window longer than the rows": toy("SSSL", window=100),
    "grouped queries": toy("SSSL", kv_heads=2),
    "one key head": toy("SL", window=3, kv_heads=1),
    "key offset": toy("SL", kv_heads=2, key_offset=True),
    "bigrams": toy("SL", kv_heads=2, bigrams=True),
    "llama": toy("L", kv_heads=2, make_model=Llama),
    "llama, windows": toy("SSSL", window=3, kv_heads=1, make_model=Llama),
    "unet, 2 layers": unet(2),
    "unet, 4 layers": unet(4),
    "unet": unet(6),
}
PIECES = [
    *(
        (name, 3)
        for name in ("SSSL", "key offset", "bigrams", "window 1", "window 2", "one key head", "llama, windows", "unet")
    ),
    *(("SSSL", chunk) for chunk in (1, 8, 13)),
    *(("window longer than the rows", 8), ("window 1", 8), ("unet", 1), ("unet", 13)),
]
"""Models, and tokens that are read at a time."""
LENGTHS = (1, 2, 7, 8, 9, 17, 24)


def rows(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Prompts that begin with BOS and hold it nowhere else: it would begin another document of unet."""
    generator = torch.Generator().manual_seed(seed)
    return [[BOS, *torch.randint(1, VOCABULARY, (length - 1,), generator=generator).tolist()] for length in lengths]


@torch.inference_mode()
def uncached(model: LanguageModel, prompt: list[int], reply: list[int]) -> torch.Tensor:
    """The logits (N, V) that choose each token of a reply, from the whole row."""
    whole = torch.tensor([prompt + reply[:-1]])
    return model.logits(model(whole, model.context(whole)))[0, len(prompt) - 1 :]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token but BOS."""
    return logits[..., BOS + 1 :].argmax(-1) + BOS + 1


@torch.inference_mode()
def cached(model: LanguageModel, prompts: list[list[int]], steps: int, chunk: int | None = None) -> torch.Tensor:
    """The same for greedy replies to all prompts together (B, N, V), the prompts read in pieces of `chunk` tokens."""
    cache = KVCache(model, len(prompts), CONTEXT + 1)
    tokens_BT, lengths_B = pad(prompts, BOS, torch.device("cpu"))
    chunk = chunk or tokens_BT.size(1)
    x_BD = torch.zeros(len(prompts), model.embedding.weight.size(1))
    for start in range(0, tokens_BT.size(1), chunk):
        piece_B = (lengths_B - start).clamp(0, chunk)
        piece_BD = take_token(cache.prefill(model, tokens_BT[:, start : start + chunk], piece_B), piece_B - 1)
        x_BD = torch.where(piece_B[:, None] > 0, piece_BD, x_BD)
    logits = [model.logits(x_BD)]
    for _ in range(steps - 1):
        logits.append(decode(model, cache, greedy(logits[-1]), torch.arange(CONTEXT + 1)))
    return torch.stack(logits, dim=1)


def deviation(model: LanguageModel, steps: int = 11, chunk: int | None = None) -> float:
    """Largest difference of a logit between the two ways; infinite if a greedy token differs."""
    prompts, worst = rows(LENGTHS), 0.0
    for prompt, found_NV in zip(prompts, cached(model, prompts, steps, chunk), strict=True):
        reply = greedy(found_NV).tolist()
        expected_NV = uncached(model, prompt, reply)
        if greedy(expected_NV).tolist() != reply:
            return float("inf")
        worst = max(worst, float((found_NV - expected_NV).abs().max()))
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_cached_is_uncached(name: str, law: Law) -> None:
    found = deviation(MODELS[name]())
    kind = "unet" if "unet" in name else "prompts of 7 lengths in one batch"
    law(f"cached = uncached, {kind}: logits, fp32; greedy tokens equal", found, BAR)


@pytest.mark.parametrize(("name", "chunk"), PIECES)
def test_prefill_in_pieces_is_prefill_at_once(name: str, chunk: int, law: Law) -> None:
    found = deviation(MODELS[name](), steps=4, chunk=chunk)
    kind = ", unet" if "unet" in name else ""
    law(f"prefill in pieces = at once{kind}: logits, fp32; greedy tokens equal", found, BAR)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "sampled"])
def test_batched_is_alone(sampling: Sampling, law: Law) -> None:
    engine, narrow = toy_engine(), toy_engine(max_rows=3)
    how: dict[str, Any] = {"samples": 2, "max_tokens": 16, "sampling": sampling, "seed": 7}
    prompts = rows((1, 5, 30, 12, 60, 63))
    alone = [engine.generate([prompt], **how)[0] for prompt in prompts]
    assert engine.generate(prompts, **how) == alone == engine.generate(prompts[::-1], **how)[::-1]
    assert narrow.generate(prompts, **how) == alone
    law("batched = alone, in any order and batch size, greedy and sampled: tokens")


def test_streamed_is_not_streamed(law: Law) -> None:
    engine = toy_engine()
    for seed, prompt in enumerate(rows((3, 11, 40))):
        [[whole]] = engine.generate([prompt], max_tokens=24, seed=seed, stop=("e", "qu"))
        pieces = [one.value for one in engine.events([prompt], max_tokens=24, seed=seed, stop=("e", "qu"))]
        shown = [piece.text for piece in pieces if isinstance(piece, Delta) and piece.kind == "text"]
        assert "".join(shown) == whole.text
    law("streamed = not streamed: text")


def test_samples_of_one_prefill_are_those_of_their_own(law: Law) -> None:
    """Greedy samples of one prompt are all the uncached continuation: no cache is shared."""
    engine = toy_engine(context=CONTEXT)
    [prompt] = rows((9,))
    [samples] = engine.generate([prompt], samples=3, max_tokens=12, sampling=GREEDY)
    for sample in samples:
        assert isinstance(sample, Completion)
        assert uncached(engine.model, prompt, sample.ids).argmax(-1).tolist() == sample.ids
    sampled = engine.generate([prompt], samples=8, max_tokens=12)[0]
    assert len({sample.ids[0] for sample in sampled}) > 1, "all samples begin with the same token"
    assert len({tuple(sample.ids) for sample in sampled}) == 8
    law("samples of one prefill = each from its own: greedy tokens")


# What is cached, broken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "method", "broken", "model"),
    [
        # The bug of one position for a whole ragged batch, of a forgotten last embedding, and of a window that is
        # ignored for the tokens of an earlier piece.
        (DecodeContext, "positions", lambda right, self, x: right(self, x)[:1], "SSSL"),
        (DecodeContext, "previous", lambda right, self, *given: torch.zeros_like(right(self, *given)), "SSSL"),
        (PrefillContext, "_visible", lambda right, *given: right(*given[:-1], None), "llama, windows"),
    ],
)
def test_the_law_can_fail(
    context: type, method: str, broken: Callable[..., Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, method, partialmethod(partial(broken, getattr(context, method))))
    assert deviation(MODELS[model](), chunk=5) > 100 * BAR
