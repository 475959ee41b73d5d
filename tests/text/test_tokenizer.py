"""Tokenizer: training, the file, bytes per token, streaming, damaged and odd input."""

import json
from itertools import count
from pathlib import Path

import pytest

from quern.text.tokenizer import SPECIAL_TOKENS, Tokenizer, compression_report, split_pattern

CORPUS = [
    "The miller grinds the grain. The grain was 1234567 years old, said the miller's daughter.\n\n" * 5,
    "मिलर अनाज पीसता है। मिलर अनाज पीसता है। " * 10 + "大家好，世界和平。你好，世界！" * 10 + "مرحبًا بالعالم " * 10,
    "👩‍👩‍👧‍👦 👩‍👩‍👧‍👦 ❤️ ❤️ 🇩🇪🇫🇷 e\u0301 e\u0301 " * 10 + "    def f(x):\n        return x\n" * 5,
]
SMALLEST = 256 + len(SPECIAL_TOKENS)
SIZE = 430  # what the corpus can just fill


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(CORPUS, SIZE)


def test_ids_are_bytes_then_merges_then_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == SIZE and not tokenizer.notes
    assert [tokenizer.decode_bytes([i]) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert list(tokenizer.special_ids) == list(SPECIAL_TOKENS)
    assert list(tokenizer.special_ids.values()) == list(range(SIZE - len(SPECIAL_TOKENS), SIZE))
    assert tokenizer.bos == tokenizer.special("<|bos|>")
    for i, merge in enumerate(tokenizer.merges):
        assert tokenizer.decode_bytes([256 + i]) == merge
    with pytest.raises(ValueError, match="no special token '<|eos|>'; there are .*bos"):
        tokenizer.special("<|eos|>")


def test_digits_are_grouped_by_two_and_marks_stay_with_their_word(tokenizer: Tokenizer) -> None:
    assert max(len(merge) for merge in tokenizer.merges if any(byte in b"0123456789" for byte in merge)) <= 2
    hindi = Tokenizer.train(["मिलर " * 50], 300)
    assert "मिलर".encode() in hindi.merges  # its vowel sign is a combining mark
    assert b"123" in Tokenizer.train(["1234567 " * 50], 300, split_pattern(3)).merges


def test_a_corpus_too_small_gives_a_smaller_vocabulary_and_says_so() -> None:
    tokenizer = Tokenizer.train(["abc abc"], 500)
    assert SMALLEST < tokenizer.vocab_size < 500
    few = "The corpus has too few different words for 500 tokens: the vocabulary has"
    assert tokenizer.notes == (f"{few} {tokenizer.vocab_size}.",)
    assert Tokenizer.train([], SMALLEST).notes == ()
    with pytest.raises(ValueError, match=f"too small.* at least {SMALLEST}"):
        Tokenizer.train(CORPUS, SMALLEST - 1)


def test_training_stops_at_its_budget_and_streams() -> None:
    endless = count()
    tokenizer = Tokenizer.train((f"word{number % 7} " * 1000 for number in endless), 300, max_bytes=1_000_000)
    assert 166 < next(endless) < 170 and tokenizer.vocab_size < 300


def test_a_damaged_file_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tokenizer.save(tmp_path / "tokenizer.json")
    contents = json.loads(path.read_text("utf-8"))
    damages = [
        {**contents, "merges": contents["merges"][::-1]},
        {**contents, "merges": contents["merges"] + contents["merges"][:1]},
        {**contents, "merges": ["not base64!"]},
        {**contents, "pattern": contents["pattern"] + " "},
        {**contents, "format": "another-2"},
    ]
    texts = [json.dumps(damage) for damage in damages] + [path.read_text("utf-8")[:-50]]
    for text in texts:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="not a sound tokenizer file"):
            Tokenizer.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file .*absent.json"):
        Tokenizer.load(tmp_path / "absent.json")


def test_token_bytes_count_the_text_exactly(tokenizer: Tokenizer) -> None:
    sizes, tokens = tokenizer.token_bytes(), tokenizer.vocabulary()
    assert [len(token) for token in tokens] == sizes.tolist() and tokens[tokenizer.bos] == b""
    assert b"".join(tokens[id_] for id_ in tokenizer.encode("naïve 42 🪨")) == "naïve 42 🪨".encode()
    assert sizes.shape == (SIZE,) and sizes.dtype == "int32"
    assert (sizes[list(tokenizer.special_ids.values())] == 0).all()
    torn = [i for i in range(256, SIZE - len(SPECIAL_TOKENS)) if "\ufffd" in tokenizer.decode([i])]
    assert torn  # tokens that are no valid UTF-8: counting their printed form would be wrong
    assert all(sizes[i] != len(tokenizer.decode([i]).encode("utf-8")) for i in range(128, 256))
    for text in (*CORPUS, "", "ünïcödé 🏳️‍🌈 \x00 ﷽"):
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode("utf-8"))


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    lone = {"a\ud800b": "a\ufffdb", "\udc00": "\ufffd", "end\ud83d": "end\ufffd", "\ud83d\ude00": "😀"}
    for text, clean in lone.items():
        assert tokenizer.decode(tokenizer.encode(text)) == clean
        assert compression_report(tokenizer, {"odd": text})[0]["bytes"] == len(clean.encode("utf-8"))
    assert Tokenizer.train(["ab\ud800 ab ab"], 300).vocab_size > SMALLEST


@pytest.mark.parametrize("unit", [" ", " \n", "a", "大"])
def test_long_runs_neither_crash_nor_lose_anything(tokenizer: Tokenizer, unit: str) -> None:
    """A backtracking regex overflows its stack on a long run of white space; the pattern must not."""
    for text in (unit * 1_000_000, unit * 1_000_000 + "x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    Tokenizer.train([text], 300)


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for wrong in (-1, tokenizer.vocab_size, 10**12):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of {SIZE}"):
            tokenizer.decode([0, wrong])


def test_compression_is_reported_by_kind(tokenizer: Tokenizer) -> None:
    rows = compression_report(tokenizer, {"english": CORPUS[0], "emoji": "👍👍", "nothing": ""})
    assert [row["kind"] for row in rows] == ["english", "emoji", "nothing"] and rows[2]["bytes_per_token"] == 0
    for row, text in zip(rows, (CORPUS[0], "👍👍"), strict=False):
        tokens, size = len(tokenizer.encode(text)), len(text.encode("utf-8"))
        assert (row["bytes"], row["tokens"], row["bytes_per_token"]) == (size, tokens, size / tokens)


def test_a_file_that_is_no_vocabulary_of_tiktokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    for content, reason in (("AA== 0\n", "must hold each of the 256 bytes once"), ("{}\n", "expected 2")):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"x.tiktoken is not a vocabulary of tiktoken's .*{reason}"):
            Tokenizer.from_tiktoken(path)
