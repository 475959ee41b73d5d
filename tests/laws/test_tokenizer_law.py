"""Law: decode(encode(x)) = x for any text, and ids = those of independent encoders with the same merges.

Two oracles, neither through the code under test, built from the JSON file alone: tiktoken, and its textbook procedure
in Python (split with the `regex` package, then merge the lowest-ranked neighbouring pair until none is left).
"""

import base64
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import SimpleBytePairEncoding

from quern.text.tokenizer import Tokenizer, split_pattern
from tests.laws.table import Law

FIXTURES = [
    "It's 1234567 o'clock; the miller's mill isn't grinding!\r\n\r\n\tdef f(x):\n        return x  # ok   \n",
    "中文分词没有空格，标点符号也不同。日本語と한국어도 있습니다。",
    "مَرْحَبًا بِالْعَالَمِ، كيف حالك؟ ١٢٣٤٥",
    "नमस्ते दुनिया, বাংলা ভাষা, ภาษาไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ❤️ 👍🏽 🇩🇪🇫🇷 1️⃣",
    "e\u0301 vs é, Z\u0351\u036b\u0343a\u0334l\u0321go\u0315, ﷽, ﬁ, ǅ, ß, İstanbul",
    "\x00\x01\x7f\u00a0\u2028\u200b\ufeff\uffff\U0010ffff",
    "<|bos|><|user_start|>text<|assistant_end|> <|endoftext|>",
    "",
    " ",
    "   x",
    "a" * 2000,
    "  \t \n  x  1 \r\n\r\n !!\n\n  \u00a0 'LL 's'x \u2028 é\u0301\u0301 \u0301x 1\u0301 ٣٤٥ ½x",
    " " * 700 + "x" + "\n" * 300 + " " * 256 + "1",
]


REPEATED = [text * 4 for text in FIXTURES] + ["the mill grinds the grain into flour " * 50]
Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(REPEATED, 600)


@pytest.fixture(scope="module")
def saved(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], str]:
    """(all tokens in rank order, the pattern) as the file on disk tells them."""
    path: Path = tokenizer.save(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    contents = json.loads(path.read_text(encoding="utf-8"))
    tokens = [bytes([i]) for i in range(256)] + [base64.b64decode(text) for text in contents["merges"]]
    return tokens, contents["pattern"]


def ranks_of(tokens: Sequence[bytes]) -> dict[bytes, int]:
    return {token: rank for rank, token in enumerate(tokens)}


def tiktokens(tokens: Sequence[bytes], pattern: str) -> Encode:
    encoding = tiktoken.Encoding("oracle", pat_str=pattern, mergeable_ranks=ranks_of(tokens), special_tokens={})
    return lambda text: encoding.encode(text, disallowed_special=())


@pytest.fixture(scope="module")
def oracles(saved: tuple[list[bytes], str]) -> dict[str, Encode]:
    book = SimpleBytePairEncoding(pat_str=saved[1], mergeable_ranks=ranks_of(saved[0]))
    return {"tiktoken's": tiktokens(*saved), "the textbook's": partial(book.encode, visualise=None)}


def differing(tokenizer: Tokenizer, encode: Encode, texts: list[str]) -> int:
    return sum(tokenizer.encode(text) != encode(text) for text in texts)


def test_ids_equal_tiktokens_and_the_books(tokenizer: Tokenizer, oracles: dict[str, Encode], law: Law) -> None:
    for name, oracle in oracles.items():
        wrong = differing(tokenizer, oracle, FIXTURES)
        law(f"token ids = {name} for the same merges (texts that differ)", wrong, unit="equal")


@pytest.mark.parametrize("digits", [1, 3])
def test_ids_equal_tiktokens_with_other_numbers_of_digits(
    digits: int, tokenizer: Tokenizer, saved: tuple[list[bytes], str], law: Law
) -> None:
    other = Tokenizer(tokenizer.merges, split_pattern(digits))
    wrong = differing(other, tiktokens(saved[0], other.pattern), FIXTURES)
    assert differing(tokenizer, other.encode, FIXTURES) > 0
    law("token ids = tiktoken's for the same merges (texts that differ)", wrong, unit="equal")


def not_most_frequent(merges: tuple[bytes, ...], pattern: str, texts: list[str]) -> int:
    """How many merges do not join the most frequent (or an equally frequent) pair of their moment."""
    counts = Counter(word for text in texts for word in regex.findall(pattern, text))
    words = [([bytes([b]) for b in word.encode("utf-8")], count) for word, count in counts.items()]
    wrong = 0
    for merge in merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, count in words:
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] += count
        most = max(pairs.values(), default=0)
        chosen = [pair for pair, count in pairs.items() if pair[0] + pair[1] == merge and count == most]
        wrong += not chosen
        for parts, _ in words:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) in chosen:
                    parts[i : i + 2] = [merge]
                i += 1
    return wrong


def test_training_joins_the_most_frequent_pair_each_time(law: Law) -> None:
    trained = Tokenizer.train(REPEATED, 400)
    wrong = not_most_frequent(trained.merges, trained.pattern, REPEATED)
    assert not_most_frequent(trained.merges[::-1], trained.pattern, REPEATED) > 0
    law("each merge joins a most frequent pair (merges that do not)", wrong, unit="equal")


PIECES = st.sampled_from([*FIXTURES[:8], "the mill", "  ", "\n", "'ll", "12", "e\u0301", "👩‍👧", "<|bos|>"])
TEXTS = st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=4))).map("".join))


@settings(max_examples=400)
@given(TEXTS)
def test_any_text_has_the_oracles_ids_and_comes_back(
    tokenizer: Tokenizer, oracles: dict[str, Encode], text: str
) -> None:
    ids = tokenizer.encode(text)
    assert [encode(text) for encode in oracles.values()] == [ids] * 2
    assert tokenizer.decode(ids) == text


def test_every_character_comes_back(tokenizer: Tokenizer, law: Law) -> None:
    wrong = 0
    for start in range(0, 0x110000, 0x1000):
        text = "".join(chr(c) for c in range(start, start + 0x1000) if not 0xD800 <= c < 0xE000)
        wrong += tokenizer.decode(tokenizer.encode(text)) != text
    law("decode(encode(x)) = x (blocks of all 1,112,064 characters that differ)", wrong, unit="equal")
