"""Tokenizers of other programs: the same ids as `tokenizers` and `tiktoken` themselves on thousands of texts."""

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tiktoken_ext import openai_public

from quern.text.hugging_face import open_tokenizer, read_tokenizer
from quern.text.tinyworld import corpus
from quern.text.tokenizer import SPECIAL_TOKENS, TIKTOKEN_FILES, Tokenizer
from tests.support.small_text import write_tiktoken

hf = pytest.importorskip("tokenizers")

# As in the tokenizer.json of Llama 3 and, for GPT-4o, of Xenova/gpt-4o.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT4O = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
PIECES = """the mill grinds GRAIN don't I'LL we've it'ſ 1 22 333 4444 ５ ½ köln Straße İstanbul ÉCOLE naïve 世界 日本語
 हिन्दी العَرَبِيَّة עִבְרִית 😀 👩‍👩‍👧 e\u0301 \u0301 .. !? <|endoftext|x {"a":1} -- http://a.b/c_d #tag \\n ǅ ª ʰ""".split()
SPACES = [" ", "  ", "\n", "\r\n", "\n\n  ", "\t", "\u00a0", "\u2003", "\u0085", "", "/", "'", "’", "\x00", "\x1c"]


def sample_texts(count: int) -> Iterator[str]:
    """Words of many scripts between all kinds of spaces, then documents of the built-in world."""
    rng = random.Random(3)
    for _ in range(count):
        yield "".join(rng.choice(PIECES) + rng.choice(SPACES) * rng.choice((1, 1, 1, 2, 5)) for _ in range(12))
    yield from islice(corpus.documents(5, 0.3, "train"), 300)


TEXTS = list(sample_texts(1700))  # 2,000 in all


def made(
    pre_tokenizer: Any, first: str, others: tuple[str, ...] = (), pairs: Callable[..., Any] | None = None, **model: Any
) -> Any:
    """A tokenizer of the library's, trained on a part of the texts. pairs: vocabulary → merges, instead of its own."""
    letters = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(vocab_size=900, initial_alphabet=letters, show_progress=False)
    trained = hf.Tokenizer(hf.models.BPE())
    trained.pre_tokenizer = pre_tokenizer
    trained.train_from_iterator(TEXTS[::3], trainer)
    body = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in (pairs(body["vocab"]) if pairs else body["merges"])]
    found = hf.Tokenizer(hf.models.BPE(body["vocab"], merges, **model))
    found.pre_tokenizer = pre_tokenizer
    found.decoder = hf.decoders.ByteLevel()
    found.add_special_tokens([first, *others])
    return found


def every_split(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs that form a token, as the library converts tiktoken's files."""
    pairs = [(token[:at], token[at:]) for token in vocab for at in range(1, len(token))]
    known = (pair for pair in pairs if vocab.keys() >= set(pair))
    return sorted(known, key=lambda pair: (vocab[pair[0] + pair[1]], vocab[pair[0]], vocab[pair[1]]))


def split(pattern: str, *how: Any) -> Any:
    words = hf.pre_tokenizers.Split(hf.Regex(pattern), *(how or ("isolated",)))
    return hf.pre_tokenizers.Sequence([words, hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2() -> Any:
    return made(hf.pre_tokenizers.ByteLevel(add_prefix_space=False), "<|endoftext|>")


def llama3(pattern: str = LLAMA3, *how: Any) -> Any:
    others = ("<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>")
    found = made(split(pattern, *how), "<|begin_of_text|>", others, pairs=every_split, ignore_merges=True)
    first = ("<|begin_of_text|>", found.token_to_id("<|begin_of_text|>"))
    begun = hf.processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[first])
    found.post_processor = hf.processors.Sequence([hf.processors.ByteLevel(trim_offsets=True), begun])
    return found


def without_defaults() -> Any:
    """GPT-2's as it is published, in the form of the library's first versions."""
    body = json.loads(gpt2().to_str())
    del body["model"]["type"], body["pre_tokenizer"]["use_regex"], body["model"]["ignore_merges"]
    body["model"]["merges"] = [" ".join(pair) for pair in body["model"]["merges"]]
    found = hf.Tokenizer.from_str(json.dumps(body))
    found.save = lambda path: Path(path).write_text(json.dumps(body), encoding="utf-8")
    return found


@pytest.mark.parametrize(
    "make",
    [gpt2, without_defaults, llama3, lambda: llama3(GPT4O), lambda: llama3(LLAMA3, "removed", True)],
    ids=["GPT-2", "GPT-2 as published", "Llama 3", "GPT-4o", "a split that keeps what matches"],
)
def test_a_tokenizer_json_gives_the_ids_of_the_library(make: Callable[[], Any], tmp_path: Path) -> None:
    theirs = make()
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = open_tokenizer(tmp_path / "tokenizer.json")
    special = {token.content: id_ for id_, token in theirs.get_added_tokens_decoder().items()}
    first = next(name for name in ("<|begin_of_text|>", "<|endoftext|>") if name in special)
    assert ours.bos == special.pop(first)
    assert {name: ours.special(name) for name in special} == special
    assert set(SPECIAL_TOKENS) <= set(ours.special_tokens)
    expected = [one.ids for one in theirs.encode_batch(TEXTS, add_special_tokens=False)]
    assert [ours.encode(text) for text in TEXTS] == expected
    assert all(ours.decode(ids) == text for ids, text in zip(expected, TEXTS, strict=True))
    saved = Tokenizer.load(ours.save(tmp_path / "ours.json"))
    assert saved.fingerprint == ours.fingerprint == open_tokenizer(tmp_path / "ours.json").fingerprint


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            body = body[int(name) if name.isdigit() else name]  # type: ignore[index]
        body[last] = value

    return change


def swap_merges(body: dict[str, Any]) -> None:
    merges = body["model"]["merges"]
    merges[100], merges[400] = merges[400], merges[100]


def move_the_special_token(body: dict[str, Any]) -> None:
    body["model"]["vocab"] = {name: id_ + 1 for name, id_ in body["model"]["vocab"].items()}
    body["added_tokens"][0]["id"] = 0


REFUSED = {
    "a normalizer": (changed("normalizer", {"type": "NFC"}), "its normalizer cannot be kept"),
    "a space in front": (changed("pre_tokenizer.add_prefix_space", True), "its steps before merging cannot be kept"),
    "another algorithm": (changed("model.type", "Unigram"), "its kind, Unigram cannot be kept"),
    "chance": (changed("model.dropout", 0.1), "its dropout cannot be kept"),
    "words as tokens": (changed("added_tokens.0.special", False), "its added tokens that are no special ones"),
    "merges in another order": (swap_merges, "its merges cannot be kept"),
    "special tokens first": (move_the_special_token, "its ids must be the single bytes, from 0, then the merges"),
    "an id that takes gigabytes": (changed("added_tokens.0.id", 2**24 - 1), "has the id 16,777,215, far above its"),
    "the id of another token": (changed("added_tokens.0.id", 5), r"special token <\|bos\|> has the id 5 of another"),
    "no first token": (changed("added_tokens.0.content", "<pad>"), "no special token begins documents: one must be"),
    "no special token": (changed("added_tokens", []), "no special token begins documents: one must be named"),
    "metaspaces": (changed("pre_tokenizer", {"type": "Metaspace"}), "its steps before merging cannot be kept"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_other_ids_is_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    body = json.loads(gpt2().to_str())
    read_tokenizer(body)
    change(body)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(ValueError, match=f"tokenizer.json is not a tokenizer that quern can use: .*{message}"):
        open_tokenizer(path)


def test_an_unknown_split_and_tokens_that_merging_never_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="its split cannot be kept"):
        read_tokenizer(json.loads(made(split(r"\w+|\W"), "<s>").to_str()))
    digits = hf.pre_tokenizers.Digits(individual_digits=True)  # as SmolLM's
    steps = hf.pre_tokenizers.Sequence([digits, hf.pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for other in (steps, split(" ?[a-z]+", "removed", True), split(LLAMA3, "removed", False)):
        with pytest.raises(ValueError, match="its split cannot be kept"):
            read_tokenizer(json.loads(made(other, "<s>").to_str()))
    body = json.loads(llama3().to_str())
    tokens = body["model"]["vocab"]
    tokens["Ġqzqz"] = len(tokens)  # no pair of tokens forms it; as a whole word it is one
    for entry in body["added_tokens"]:
        entry["id"] += 1
    whole, ours = hf.Tokenizer.from_str(json.dumps(body)), read_tokenizer(body)
    assert ours.encode("a qzqz") == whole.encode("a qzqz", add_special_tokens=False).ids
    assert ours.encode("a qzqz")[-1] == len(tokens) - 1
    del body["model"]["ignore_merges"]  # as in files of older versions
    with pytest.raises(ValueError, match="its whole words cannot be kept"):
        read_tokenizer(body)


# tiktoken ---------------------------------------------------------------------------------------------------


@cache
def trained_merges() -> tuple[bytes, ...]:
    return Tokenizer.train(TEXTS[::3], 1500).merges


@pytest.fixture(scope="module")
def published() -> Iterator[dict[int, dict[str, Any]]]:
    """Size of the file → tiktoken's own settings of the vocabulary, without the file, which it would download."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *address, **expected: {})
        settings = {
            50_256: openai_public.r50k_base(),
            100_256: openai_public.cl100k_base(),
            199_998: openai_public.o200k_base(),
        }
    # Llama 3's tokenizer.py, which is no part of tiktoken.
    settings[128_000] = {"pat_str": LLAMA3, "special_tokens": {"<|endoftext|>": 128_000}}
    yield settings


@pytest.mark.parametrize("size", TIKTOKEN_FILES)
def test_a_tiktoken_file_gives_tiktokens_ids(published: dict[int, dict[str, Any]], size: int, tmp_path: Path) -> None:
    ranks, settings = write_tiktoken(tmp_path / "v.tiktoken", size, trained_merges()), published[size]
    ours = open_tokenizer(tmp_path / "v.tiktoken")
    how = {"pat_str": settings["pat_str"], "special_tokens": settings["special_tokens"]}
    theirs = tiktoken.Encoding("theirs", mergeable_ranks=ranks, **how)
    assert ours.bos == settings["special_tokens"]["<|endoftext|>"] and not ours.notes
    assert [ours.encode(text) for text in TEXTS] == theirs.encode_ordinary_batch(TEXTS)


def test_a_vocabulary_of_another_size_is_split_as_gpt2s_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "v.tiktoken"
    write_tiktoken(path, 2000, trained_merges())
    (note,) = open_tokenizer(path).notes
    assert "has 2,000 tokens, as no vocabulary that quern knows: it splits text as GPT-2's" in note
