"""A GGUF export in llama.cpp = native: ids, probabilities and chat prompts, from the file alone.

The oracle is llama.cpp itself (tests/support/llama_cpp.py), which shares no code with quern. fp32 probabilities agree
within 1e-4; in a smaller dtype the error is at most that of the dtype. Some tests break what is exported and require
the same comparison to notice.
"""

import random
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.interop import export_gguf
from quern.text.chat import render, render_prompt
from quern.text.tinyworld import corpus
from quern.text.tokenizer import GPT2_SPLIT_PATTERN, LLAMA3_SPLIT_PATTERN, Tokenizer, split_pattern
from tests.laws.table import Law
from tests.support.exported import CHAT, LLAMAS
from tests.support.gguf_run import BLOCKS, gguf_recipe, log_probabilities, single_digits, toy, write_toy
from tests.support.llama_cpp import LlamaCpp

pytestmark = pytest.mark.usefixtures("eager")

pytest.importorskip("gguf")

BAR = 1e-4
SHAPES = LLAMAS | {"rows without a token": {"vocab_size": 336}}


def ids(T: int = 41) -> list[int]:
    return torch.randint(0, single_digits().vocab_size, (T,), generator=torch.Generator().manual_seed(T)).tolist()


# Probabilities ----------------------------------------------------------------------------------------------


def deviation(llama: LlamaCpp, path: Path, shape: dict[str, Any], *, tied: bool = False, **facts: Any) -> float:
    """Largest difference of a next-token probability between llama.cpp and the model."""
    recipe = gguf_recipe(single_digits(), **shape)
    weights = write_toy(path, recipe, single_digits(), tied=tied, **facts)
    assert ("output.weight" in weights) is not tied
    llama.open(path)
    ours = log_probabilities(toy(recipe, tied=tied), ids()).exp()
    return float((torch.from_numpy(llama.probabilities(ids())) - ours).abs().max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_probabilities_are_llama_cpps(name: str, tied: bool, llama: LlamaCpp, tmp_path: Path, law: Law) -> None:
    found = deviation(llama, tmp_path / "a.gguf", SHAPES[name], tied=tied)
    law("GGUF in llama.cpp = native: next-token probabilities, F32, grouped queries, head tied or not", found, BAR)


MATRICES_IN_SERIES = 4 * 2 + 1
"""Query, out, gate and down of two layers, and the head."""
ROUNDING = {"F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 2.0**-7}
"""Relative error of a number. Q8_0: half a step of 1/127 of its block's largest, which is about twice the rms."""


@pytest.mark.parametrize("kind", ROUNDING)
def test_smaller_dtypes_err_by_their_rounding(kind: str, llama: LlamaCpp, tmp_path: Path, law: Law) -> None:
    """llama.cpp rounds both factors of each product to the dtype: 2 u for each matrix, added up over the matrices."""
    recipe = gguf_recipe(single_digits(), **BLOCKS)
    write_toy(tmp_path / "a.gguf", recipe, single_digits(), kind=kind)
    llama.open(tmp_path / "a.gguf")
    ours = log_probabilities(toy(recipe), ids())
    theirs = torch.from_numpy(llama.probabilities(ids())).log()
    found = float((theirs - ours).norm() / (ours - ours.mean(-1, keepdim=True)).norm())
    bar = 2 * MATRICES_IN_SERIES * ROUNDING[kind]
    law(f"GGUF in llama.cpp = native: log-probabilities, {kind}, relative 2-norm", found, bar)


@pytest.mark.parametrize("facts", [{"llama.rope.freq_base": 1e5}, {"llama.attention.layer_norm_rms_epsilon": 1e-5}])
def test_a_broken_export_is_noticed(facts: dict[str, Any], llama: LlamaCpp, tmp_path: Path) -> None:
    assert deviation(llama, tmp_path / "a.gguf", {}, **facts) > 10 * BAR


# The words --------------------------------------------------------------------------------------------------

ODD = "ab'sldteSLDTVREM 12²٣\n\r\t\u00a0\u0085\u2028é\u0301?!-हि你👋K\u200b\x00<|>"
WORDS = (
    *"the don't we'LL miller Grüße हिन्दी 你好 2024 3.14 !!! ... <|bos|> <|user_end|> x".split(),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\t", "  ", "\n\n", "\r\n"),
)


@cache
def characters() -> list[str]:
    """Characters of Unicode 3.2, which every program knows, and emoji: programs know different versions of Unicode."""
    known = unicodedata.ucd_3_2_0
    found = [chr(code) for code in range(0x30000) if known.category(chr(code)) not in ("Cn", "Cs")]
    return [*found, *map(chr, range(0x1F300, 0x1F650))]


def fuzzed(count: int, seed: int) -> list[str]:
    """Texts of up to 40 odd characters, of any characters, of words, and of letters that many tokens have."""
    pick, letters = random.Random(seed), (ODD, ODD, characters(), "aeinorst  hl")

    def text() -> str:
        kind, size = pick.randrange(5), pick.randrange(41)
        if kind < 4:
            return "".join(pick.choices(letters[kind], k=size))
        return "".join(pick.choice(("", " ")) + pick.choice(WORDS) for _ in range(size // 2))

    return [text() for _ in range(count)]


@cache
def pairs_of_bytes(pattern: str) -> Tokenizer:
    """Any two bytes merge, so that ids tell nearly every split of a text from any other."""
    return Tokenizer([bytes([i // 256, i % 256]) for i in range(2**16)], pattern)


@cache
def trained(pattern: str) -> Tokenizer:
    return Tokenizer.train(corpus.documents(0, 0.2, "train"), 1200, pattern)


def opened(llama: LlamaCpp, path: Path, tokenizer: Tokenizer, **facts: Any) -> dict[str, Any]:
    """llama.cpp with the words of a tokenizer and the least model."""
    least = {"width": 12, "head_dim": 2, "heads": 6, "kv_heads": 2, "mlp_width": 8, "depth": 1}
    write_toy(path, gguf_recipe(tokenizer, **least), tokenizer, **facts)
    return llama.open(path)


def differing(llama: LlamaCpp, tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    return [text for text, found in zip(texts, llama.tokenize(texts), strict=True) if found != tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("make", "pattern", "count"),
    [
        pytest.param(pairs_of_bytes, split_pattern(1), 10_000, id="pairs of bytes"),
        pytest.param(trained, split_pattern(1), 8_000, id="trained"),
        pytest.param(pairs_of_bytes, GPT2_SPLIT_PATTERN, 1_000, id="GPT-2's split"),
        pytest.param(pairs_of_bytes, LLAMA3_SPLIT_PATTERN, 1_000, id="Llama 3's split"),
    ],
)
def test_ids_are_llama_cpps(
    make: Callable[[str], Tokenizer], pattern: str, count: int, llama: LlamaCpp, tmp_path: Path, law: Law
) -> None:
    tokenizer = make(pattern)
    assert export_gguf.other_ids(tokenizer) == ""
    opened(llama, tmp_path / "a.gguf", tokenizer)
    found = differing(llama, tokenizer, fuzzed(count, seed=count))
    law("ids of llama.cpp for a GGUF = native: 20,000 fuzzed texts (that differ)", found, unit="equal")


@pytest.mark.parametrize("digits", [2, 3])
def test_a_split_that_is_refused_has_other_ids(digits: int, llama: LlamaCpp, tmp_path: Path) -> None:
    tokenizer = trained(split_pattern(digits))
    assert export_gguf.other_ids(tokenizer)
    opened(llama, tmp_path / "a.gguf", tokenizer)
    assert differing(llama, tokenizer, ["in 2024", "a b"]) == ["in 2024"]


def test_what_llama_cpp_splits_otherwise(llama: LlamaCpp, tmp_path: Path) -> None:
    """The known exceptions: white space of 256 characters before a line break; a long s after an apostrophe."""
    tokenizer = pairs_of_bytes(split_pattern(1))
    opened(llama, tmp_path / "a.gguf", tokenizer)
    equal = [" " * 255 + "\n", " " * 300 + "x", "\n" * 600, "a" * 3000, "'sb", "ſb", "1" * 301]
    other = [" " * 256 + "\n", "'ſb"]
    assert differing(llama, tokenizer, [*equal, *other]) == other


# Chat -------------------------------------------------------------------------------------------------------


def test_the_chat_template_is_the_chat_format(llama: LlamaCpp, tmp_path: Path, law: Law) -> None:
    tokenizer = single_digits()
    facts = opened(llama, tmp_path / "a.gguf", tokenizer)
    for count in (2, 4):
        [asked] = llama.tokenize([llama.render(CHAT[:count], add_generation_prompt=True)], special=True)
        assert asked == render_prompt(tokenizer, CHAT[:count])
    [whole] = llama.tokenize([llama.render(CHAT[:3], add_generation_prompt=False)], special=True)
    assert whole == render(tokenizer, CHAT[:3])[0].tolist()
    assert llama.detokenize(whole) == tokenizer.decode(whole)
    end = tokenizer.special("<|assistant_end|>")
    assert (facts["bos"], facts["eos"], facts["eot"]) == (tokenizer.bos, end, end)
    every = range(tokenizer.vocab_size)
    assert llama.ends(every) == [token in (tokenizer.bos, end) for token in every]
    law("GGUF chat template in llama.cpp = native: ids of a conversation")
