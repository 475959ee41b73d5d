"""Cached = uncached, batched = alone, chunked prefill = whole, samples share a prefill, streamed = not; gpt and llama.

The oracle is the model over whole rows (`CausalContext`), run again for every token. Logits within 1e-5 in
fp32, greedy tokens equal. The last tests break the cache on purpose and require the same comparison to
notice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from quern.generate import cache as cache_module
from quern.generate.cache import DecodeContext, KVCache, PrefillContext, decode, pad
from quern.generate.reply import Completion, Delta
from quern.generate.sampling import GREEDY, Sampling
from quern.model.base import LanguageModel
from quern.model.context import CausalContext
from quern.model.gpt import GPT
from quern.model.llama import Llama
from tests.support.toy_engine import toy_engine, toy_model

BAR = 1e-5
CONTEXT = 32


@dataclass(frozen=True)
class Pattern:
    windows: str
    window: int | None = None
    kv_heads: int = 4
    make_model: type = GPT


PATTERNS = {
    "S": Pattern("S"),
    "L": Pattern("L"),
    "SL": Pattern("SL"),
    "SSSL": Pattern("SSSL"),
    "window 1": Pattern("SSSL", window=1),
    "window 2": Pattern("SL", window=2),
    "window longer than the rows": Pattern("SSSL", window=100),
    "grouped queries": Pattern("SSSL", kv_heads=2),
    "one key head": Pattern("SL", window=3, kv_heads=1),
    "llama": Pattern("L", kv_heads=2, make_model=Llama),
    "llama, windows": Pattern("SSSL", window=3, kv_heads=1, make_model=Llama),
}
PIECES = ("SSSL", "window 1", "window 2", "window longer than the rows", "one key head", "llama", "llama, windows")
LENGTHS = (1, 2, 7, 8, 9, 17, 20)


def build(pattern: Pattern) -> LanguageModel:
    return toy_model(
        pattern.windows,
        window=pattern.window,
        kv_heads=pattern.kv_heads,
        context=CONTEXT,
        make_model=pattern.make_model,
    )


def rows(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def uncached(model: LanguageModel, prompt: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits (steps, V) that chose them, each from the whole row."""
    ids, logits = list(prompt), []
    for _ in range(steps):
        logits_V = model.logits(model(torch.tensor([ids]), CausalContext()))[0, -1]
        logits.append(logits_V)
        ids.append(int(logits_V.argmax()))
    return ids[len(prompt) :], torch.stack(logits)


@torch.inference_mode()
def cached(
    model: LanguageModel, prompts: list[list[int]], steps: int, chunk: int | None = None
) -> tuple[list[list[int]], torch.Tensor]:
    """The same for all prompts together (B, steps, V), the prompts read in pieces of `chunk` tokens."""
    cache = KVCache(model, len(prompts), CONTEXT + 1)
    tokens_BT, lengths_B = pad(prompts, 0, torch.device("cpu"))
    chunk = chunk or tokens_BT.size(1)
    x_BD = torch.zeros(len(prompts), model.embedding.weight.size(1))
    for start in range(0, tokens_BT.size(1), chunk):
        piece_B = (lengths_B - start).clamp(0, chunk)
        piece_BD = cache.prefill(model, tokens_BT[:, start : start + chunk], piece_B)
        x_BD = torch.where(piece_B[:, None] > 0, piece_BD, x_BD)
    logits = [model.logits(x_BD)]
    for _ in range(steps - 1):
        logits.append(decode(model, cache, logits[-1].argmax(-1), torch.arange(CONTEXT + 1)))
    logits_BNV = torch.stack(logits, dim=1)
    return logits_BNV.argmax(-1).tolist(), logits_BNV


def deviation(
    model: LanguageModel, lengths: tuple[int, ...] = LENGTHS, steps: int = 11, chunk: int | None = None
) -> float:
    """Largest difference of a logit between the two ways; infinite if a greedy token differs."""
    prompts = rows(lengths)
    tokens, logits_BNV = cached(model, prompts, steps, chunk)
    worst = 0.0
    for row, prompt in enumerate(prompts):
        expected, expected_NV = uncached(model, prompt, steps)
        if tokens[row] != expected:
            return float("inf")
        worst = max(worst, float((logits_BNV[row] - expected_NV).abs().max()))
    return worst


@pytest.mark.parametrize("name", PATTERNS)
def test_cached_is_uncached(name: str, law: Callable[..., None]) -> None:
    found = deviation(build(PATTERNS[name]))
    law(
        "cached = uncached, prompts of 7 lengths in one batch: logits, fp32; greedy tokens equal",
        found,
        "≤ 1e-5",
    )
    assert found <= BAR


@pytest.mark.parametrize("chunk", [1, 3, 8, 13])
@pytest.mark.parametrize("name", PIECES)
def test_prefill_in_pieces_is_prefill_at_once(name: str, chunk: int, law: Callable[..., None]) -> None:
    found = deviation(build(PATTERNS[name]), steps=4, chunk=chunk)
    law("prefill in pieces = at once: logits, fp32; greedy tokens equal", found, "≤ 1e-5")
    assert found <= BAR


def test_a_short_look_at_the_cache_is_enough() -> None:
    """Decoding that looks only at the slots in use equals decoding that looks at all of them."""
    model = build(PATTERNS["SSSL"])
    [prompt] = rows((9,))
    with torch.inference_mode():
        results = []
        for span in (12, CONTEXT + 1):
            cache = KVCache(model, 1, CONTEXT + 1)
            cache.prefill(model, *pad([prompt], 0, torch.device("cpu")))
            results.append([decode(model, cache, torch.tensor([t]), torch.arange(span)) for t in (5, 6, 7)])
    assert max(float((a - b).abs().max()) for a, b in zip(*results, strict=True)) <= BAR


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "sampled"])
def test_batched_is_alone(sampling: Sampling, law: Callable[..., None]) -> None:
    engine = toy_engine()
    prompts = rows((1, 5, 30, 12, 60, 63, 2))
    together = engine.generate(prompts, samples=3, max_tokens=24, sampling=sampling, seed=7)
    alone = [engine.generate([p], samples=3, max_tokens=24, sampling=sampling, seed=7)[0] for p in prompts]
    assert together == alone
    reordered = engine.generate(prompts[::-1], samples=3, max_tokens=24, sampling=sampling, seed=7)
    assert reordered[::-1] == alone
    narrow = toy_engine(max_rows=4)
    assert narrow.generate(prompts, samples=3, max_tokens=24, sampling=sampling, seed=7) == alone
    law("batched = alone, in any order and batch size, greedy and sampled: tokens", "equal", "equal")


def test_streamed_is_not_streamed(law: Callable[..., None]) -> None:
    engine = toy_engine()
    for seed, prompt in enumerate(rows((3, 11, 40))):
        [[whole]] = engine.generate([prompt], max_tokens=24, seed=seed, stop=("e", "qu"))
        pieces = [one.value for one in engine.events([prompt], max_tokens=24, seed=seed, stop=("e", "qu"))]
        shown = [piece.text for piece in pieces if isinstance(piece, Delta) and piece.kind == "text"]
        assert "".join(shown) == whole.text
    law("streamed = not streamed: text", "equal", "equal")


def test_samples_of_one_prefill_are_those_of_their_own(law: Callable[..., None]) -> None:
    """Greedy samples of one prompt are all the uncached continuation: no cache is shared."""
    engine = toy_engine(context=CONTEXT)
    [prompt] = rows((9,))
    [samples] = engine.generate([prompt], samples=3, max_tokens=12, sampling=GREEDY)
    expected, _ = uncached(engine.model, prompt, 12)
    for sample in samples:
        assert isinstance(sample, Completion)
        assert sample.ids == expected[: len(sample.ids)]
    sampled = engine.generate([prompt], samples=8, max_tokens=12)[0]
    assert len({sample.ids[0] for sample in sampled}) > 1, "all samples begin with the same token"
    assert len({tuple(sample.ids) for sample in sampled}) == 8
    law("samples of one prefill = each from its own: greedy tokens", "equal", "equal")


class WindowOneTooWide(DecodeContext):
    """The bug of a ring that keeps one token more than the window."""

    def attend(self, layer, q_BTHE, k_BTKE, v_BTKE, window, scale=None):  # noqa: ANN001, ANN201
        keys = self._cache.keys_BKRE[layer]
        if keys.size(2) < self._cache.max_tokens:
            fresh = torch.zeros_like(keys[:, :, :1])
            self._cache.keys_BKRE[layer] = torch.cat([keys, fresh], dim=2)
            self._cache.values_BKRE[layer] = torch.cat([self._cache.values_BKRE[layer], fresh], dim=2)
            self._cache.rings[layer] += 1
        return super().attend(layer, q_BTHE, k_BTKE, v_BTKE, window, scale)


class PositionsOfTheFirstRow(DecodeContext):
    """The bug of one position for a whole ragged batch."""

    def positions(self, x_BTD):  # noqa: ANN001, ANN201
        return super().positions(x_BTD)[:1]


class NoSmear(DecodeContext):
    """The bug of a forgotten last embedding."""

    def previous(self, x_BTD, name):  # noqa: ANN001, ANN201
        return torch.zeros_like(super().previous(x_BTD, name))


class PaddingIsStored(PrefillContext):
    """The bug of a prefill that takes padding for tokens."""

    def _store(self, slots_BKRE, new_BTKE):  # noqa: ANN001, ANN201
        lengths_B, self._lengths_B = self._lengths_B, torch.full_like(self._lengths_B, new_BTKE.size(1))
        super()._store(slots_BKRE, new_BTKE)
        self._lengths_B = lengths_B


class OldTokensNeverLeave(PrefillContext):
    """The bug of a window that is ignored for the tokens of an earlier piece."""

    def _visible(self, T, ring, used, window):  # noqa: ANN001, ANN201
        return super()._visible(T, ring, used, None)


@pytest.mark.parametrize(
    ("name", "broken", "pattern"),
    [
        ("DecodeContext", PositionsOfTheFirstRow, "SSSL"),
        ("DecodeContext", NoSmear, "SSSL"),
        ("DecodeContext", WindowOneTooWide, "SSSL"),
        ("PrefillContext", PaddingIsStored, "SSSL"),
        ("PrefillContext", OldTokensNeverLeave, "SSSL"),
        ("DecodeContext", PositionsOfTheFirstRow, "llama"),
        ("PrefillContext", OldTokensNeverLeave, "llama, windows"),
    ],
)
def test_the_law_can_fail(name: str, broken: type, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(PATTERNS[pattern])
    assert deviation(model, chunk=5) <= BAR
    monkeypatch.setattr(cache_module, name, broken)
    assert deviation(model, chunk=5) > 100 * BAR
