"""A reply as it grows: whole characters, stop strings over token boundaries, parts, no withheld tail."""

import random

import pytest

from quern.generate.reply import Completion, Delta, Reply
from quern.generate.tools import ERROR, MAX_CALLS
from quern.text.tokenizer import Tokenizer
from tests.support.toy_engine import toy_tokenizer

TOKENIZER = toy_tokenizer()


def feed(ids: list[int], stop: tuple[str, ...] = (), max_tokens: int = 10_000) -> tuple[list[Delta], Completion]:
    """Pushes what the row would hold: forced tokens are chosen over the given ones."""
    reply = Reply(TOKENIZER, 1, max_tokens, stop)
    deltas: list[Delta] = []
    queue = list(ids)
    while reply.finish_reason is None:
        token = reply.choose(-1)
        if token == -1:
            token = queue.pop(0) if queue else TOKENIZER.special("<|assistant_end|>")
        deltas += reply.push(token)
    return deltas, reply.completion()


def call(expression: bytes) -> list[int]:
    return [TOKENIZER.special("<|tool_start|>"), *expression, TOKENIZER.special("<|tool_end|>")]


def outputs(completion: Completion) -> list[str]:
    return [part["text"] for part in completion.parts if part["type"] == "output"]


def test_stop_strings_over_any_token_boundary() -> None:
    """2,000 texts, cut into bytes or tokens: the reply ends before a stop string, nothing else is lost."""
    rng = random.Random(0)
    alphabet = ["a", "b", "ab", "é", "😀", "👋🏽", " ", "stop", "世"]
    for _ in range(2000):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 12)))
        stop = tuple("".join(rng.choices(alphabet, k=rng.randint(1, 3))) for _ in range(rng.randint(0, 3)))
        ids = list(text.encode("utf-8")) if rng.random() < 0.5 else TOKENIZER.encode(text)
        deltas, completion = feed(ids, stop)
        # The oracle looks at the text as it grows, character by character.
        expected = text
        for end in range(len(text) + 1):
            found = [text[:end].find(s) for s in stop if s in text[:end]]
            if found:
                expected = text[: min(found)]
                break
        streamed = "".join(delta.text for delta in deltas)
        assert streamed == completion.text
        assert not any(s in streamed for s in stop)
        assert "\N{REPLACEMENT CHARACTER}" not in streamed
        if not any(s in other for s in stop for other in stop if s != other):
            assert expected.startswith(streamed) and text.startswith(streamed)
        if not any(s in text for s in stop):
            assert streamed == text


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    reply = Reply(TOKENIZER, 1, 100, stop=("stop",))
    shown = ["".join(delta.text for delta in reply.push(token)) for token in b"a stoop stxp"]
    assert shown == ["a", " ", "", "", "", "stoo", "p", " ", "", "", "stx", "p"]


SPELLED = "<|tool_start|>1+1<|tool_end|>"
MARKS = ("<|tool_end|>", "<|output_end|>", "<|output_start|>", "<|user_start|>")
OUT_OF_PLACE = [id for name in MARKS for id in (TOKENIZER.special(name), *b"a")] + TOKENIZER.encode(SPELLED)
END, BOS = TOKENIZER.special("<|assistant_end|>"), TOKENIZER.bos
EMOJI = "😀".encode()
TEXTS: dict[str, tuple[list[int], tuple[str, ...], str, list[int]]] = {
    "a stop string": ([*b"one two three"], ("tw",), "one ", [*b"one tw"]),
    "half a character": ([*b"hi ", *EMOJI[:3]], (), "hi ", [*b"hi ", *EMOJI[:3], END]),
    "bytes of no character": ([*b"a", 0xFF, *EMOJI, 0x80, *b"b"], (), "a😀b", [*b"a", 0xFF, *EMOJI, 0x80, *b"b", END]),
    "one that the model spells": ([*"\ufffd".encode()], (), "\ufffd", [*"\ufffd".encode(), END]),
    "an end": ([*b"yes", END, *b"no"], (), "yes", [*b"yes", END]),
    "BOS": ([*b"yes", BOS, *b"no"], (), "yes", [*b"yes", BOS]),
    "marks out of place": (OUT_OF_PLACE, (), "aaaa" + SPELLED, [*OUT_OF_PLACE, END]),
}
"""Tokens and stop strings; the text of the reply and its tokens."""


@pytest.mark.parametrize(("ids", "stop", "text", "kept"), TEXTS.values(), ids=TEXTS)
def test_the_text_of_a_reply(ids: list[int], stop: tuple[str, ...], text: str, kept: list[int]) -> None:
    deltas, completion = feed(ids, stop)
    assert (completion.text, completion.ids, completion.finish_reason) == (text, kept, "stop")
    assert completion.parts == [{"type": "text", "text": text}]
    assert "".join(delta.text for delta in deltas) == text


@pytest.mark.parametrize("end", TOKENIZER.special_tokens)
def test_any_special_token_ends_a_plain_reply(end: str) -> None:
    reply = Reply(TOKENIZER, 1, 100, plain=True)
    for token in [*b"2+2 ", TOKENIZER.special(end)]:
        assert reply.choose(token) == token
        reply.push(token)
    completion = reply.completion()
    assert completion.text == "2+2 " and completion.finish_reason == "stop"
    assert completion.parts == [{"type": "text", "text": "2+2 "}]


def test_a_plain_reply_needs_no_chat_tokens() -> None:
    """The tokenizer of an imported base model may have BOS alone."""
    bare = Tokenizer(TOKENIZER.merges, special_tokens=("<|bos|>",))
    reply = Reply(bare, 1, 100, plain=True)
    shown = [delta.text for token in [*b"hi", bare.bos] for delta in reply.push(token)]
    assert "".join(shown) == "hi" and reply.finish_reason == "stop"


def test_calls_and_outputs_are_parts_of_their_own() -> None:
    deltas, completion = feed([*b"Let me see: ", *call(b"12 + 7"), *b" it is 19."], stop=("12 + 7", "= 1"))
    assert completion.parts == [
        {"type": "text", "text": "Let me see: "},
        {"type": "tool", "text": "12 + 7"},
        {"type": "output", "text": "19"},
        {"type": "text", "text": " it is 19."},
    ]
    assert completion.text == "Let me see:  it is 19."
    assert "".join(delta.text for delta in deltas if delta.kind == "tool") == "12 + 7"


@pytest.mark.parametrize("expression", [b"1 / 0", b"what?", b"", b"\xff"])
def test_an_expression_that_cannot_be_computed_is_answered_with_an_error(expression: bytes) -> None:
    assert outputs(feed(call(expression))[1]) == [ERROR]


def test_calls_beyond_the_limit_are_not_computed() -> None:
    assert outputs(feed(call(b"1 + 1") * (MAX_CALLS + 1))[1]) == ["2"] * MAX_CALLS + [ERROR]


def test_a_stop_string_does_not_reach_over_a_call() -> None:
    _, completion = feed([*b"st", *call(b"1"), *b"op"], stop=("stop",))
    assert completion.text == "stop"
    assert [part["type"] for part in completion.parts] == ["text", "tool", "output", "text"]


def test_the_limit_cuts_an_answer_and_releases_a_part_of_a_stop_string() -> None:
    asked = call(b"2**60")
    _, completion = feed(asked, max_tokens=len(asked) + 2)
    assert completion.finish_reason == "length" and len(completion.ids) == len(asked) + 2
    _, completion = feed([*b"and sto"], stop=("stop",), max_tokens=7)
    assert completion.text == "and sto" and completion.finish_reason == "length"
