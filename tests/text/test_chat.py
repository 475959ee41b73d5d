"""Chat format: the exact rendering, what is learned, and content that tries to be a special token."""

import re
from itertools import chain
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.text.chat import ContentPart, Message, render, render_prompt, validate
from quern.text.tokenizer import SPECIAL_TOKENS, Tokenizer


def content(*pairs: tuple[str, str]) -> Any:
    return [{"type": kind, "text": text} for kind, text in pairs]


CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": content(("text", "What is "), ("text", "17*3?"))},
    {"role": "assistant", "content": content(("text", "It is "), ("tool", "17*3"), ("output", "51"), ("text", "51."))},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Its merges come from text full of special tokens' names, so that look-alikes are few, long tokens."""
    texts = [name * 20 + f" {name[2:-2]} " * 20 for name in SPECIAL_TOKENS]
    return Tokenizer.train([*texts, "What is the sum? It is brief. " * 20], 400)


def test_the_rendering_is_exactly_this_and_what_the_assistant_writes_is_learned(tokenizer: Tokenizer) -> None:
    ids, mask = render(tokenizer, CONVERSATION)
    assert ids.dtype == np.int32 and mask.dtype == np.bool_ and ids.shape == mask.shape
    assert tokenizer.decode(ids.tolist()) == (
        "<|bos|><|system_start|>Be brief.<|system_end|><|user_start|>What is 17*3?<|user_end|>"
        "<|assistant_start|>It is <|tool_start|>17*3<|tool_end|><|output_start|>51<|output_end|>51."
        "<|assistant_end|><|user_start|>Thanks<|user_end|><|assistant_start|>Welcome<|assistant_end|>"
    )
    learned = "It is <|tool_start|>17*3<|tool_end|>51.<|assistant_end|>Welcome<|assistant_end|>"
    assert tokenizer.decode(ids[mask].tolist()) == learned
    assert tokenizer.decode(ids[~mask].tolist()) == (
        "<|bos|><|system_start|>Be brief.<|system_end|><|user_start|>What is 17*3?<|user_end|>"
        "<|assistant_start|><|output_start|>51<|output_end|><|user_start|>Thanks<|user_end|><|assistant_start|>"
    )


def test_a_prompt_goes_on_with_the_turn_of_the_assistant_unless_a_call_is_open(tokenizer: Tokenizer) -> None:
    assert render_prompt(tokenizer, CONVERSATION) == render(tokenizer, CONVERSATION)[0][:-1].tolist()
    assert render_prompt(tokenizer, CONVERSATION[:2])[-1] == tokenizer.special("<|assistant_start|>")
    open_call: Message = {"role": "assistant", "content": content(("tool", "1+1"))}
    with pytest.raises(ValueError, match="add its output"):
        render_prompt(tokenizer, [*CONVERSATION[:2], open_call])


# Special tokens' names whole, cut anywhere, nested in each other, and glued out of parts.
CUT = {name[begin:end] for name in SPECIAL_TOKENS for end in range(19) for begin in range(end)}
NESTED = {f"{name[:at]}{other}{name[at:]}" for name in SPECIAL_TOKENS for other in SPECIAL_TOKENS for at in range(11)}
PIECE = st.one_of(*(st.sampled_from(sorted(some)) for some in (SPECIAL_TOKENS, CUT, NESTED)), st.text(max_size=3))
TEXT = st.lists(PIECE, max_size=6).map("".join)


PART = {kind: st.builds(ContentPart, type=st.just(kind), text=TEXT) for kind in ("text", "tool", "output")}
CALL = st.tuples(PART["tool"]) | st.tuples(PART["tool"], PART["output"])
USER = TEXT | st.lists(PART["text"])
ASSISTANT = TEXT | st.lists(st.tuples(PART["text"]) | CALL).map(lambda parts: [*chain.from_iterable(parts)])
TURNS = st.lists(st.tuples(USER, ASSISTANT), min_size=1, max_size=3)


def assert_special_tokens_are_structure(tokenizer: Tokenizer, system: str, turns: list[Any]) -> None:
    """The special tokens of a rendering are those of its structure, whatever its contents spell."""
    messages: list[Message] = [{"role": "system", "content": system}]
    expected = ["<|bos|>", "<|system_start|>", "<|system_end|>"]
    contents = system
    for user, assistant in turns:
        pair: list[tuple[Literal["user", "assistant"], Any]] = [("user", user), ("assistant", assistant)]
        for role, content in pair:
            messages.append(Message(role=role, content=content))
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            expected.append(f"<|{role}_start|>")
            for part in parts:
                contents += part["text"]
                if part["type"] != "text":
                    expected += [f"<|{part['type']}_start|>", f"<|{part['type']}_end|>"]
            expected.append(f"<|{role}_end|>")
    ids = render(tokenizer, messages)[0].tolist()
    names = {token: name for name, token in tokenizer.special_ids.items()}
    assert [names[token] for token in ids if token in names] == expected
    assert tokenizer.decode([token for token in ids if token not in names]) == contents
    prompt = render_prompt(tokenizer, messages[:-1])
    assert prompt == ids[: len(prompt)]


@settings(max_examples=200)
@given(TEXT, TURNS)
def test_content_never_makes_a_special_token(tokenizer: Tokenizer, system: str, turns: list[Any]) -> None:
    assert_special_tokens_are_structure(tokenizer, system, turns)


def test_the_check_sees_a_tokenizer_that_lets_special_tokens_through(tokenizer: Tokenizer) -> None:
    class Careless(Tokenizer):
        def encode(self, text: str) -> list[int]:
            return self._encoding.encode(text, allowed_special="all")

    assert_special_tokens_are_structure(tokenizer, "<|bos|>", [("a", "b")])
    with pytest.raises(AssertionError):
        assert_special_tokens_are_structure(Careless(tokenizer.merges), "<|bos|>", [("a", "b")])


OUTPUT = {"role": "assistant", "content": content(("output", "1"))}
WRONG: list[tuple[Any, str]] = [
    ([], "empty: give at least one user message"),
    ([{"role": "system", "content": "x"}], "only a system message: add a user message"),
    (CONVERSATION[1:2] * 2, "message 2 is from the user, expected the assistant"),
    ([CONVERSATION[1], CONVERSATION[0]], "message 2 is a system message: only the first"),
    ([{"role": "robot", "content": "x"}], "role 'robot': use one of system, user, assistant"),
    ([{"role": "user"}], 'message 1 must be an object with "role" and "content"'),
    ([{"role": "user", "content": None}], "content must be text or a list of parts"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], 'needs "type" and "text"'),
    ([{"role": "user", "content": content(("image", "x"))}], "type 'image': use one of text, tool"),
    ([{"role": "user", "content": content(("tool", "1"))}], "only the assistant can hold a 'tool'"),
    ([CONVERSATION[1], OUTPUT], "message 2: an output must directly follow the tool call"),
]


@pytest.mark.parametrize(("messages", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_conversation_is_refused_with_what_to_do(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    for check in (validate, lambda m: render(tokenizer, m), lambda m: render_prompt(tokenizer, m)):
        with pytest.raises(ValueError, match=re.escape(message)):
            check(messages)
