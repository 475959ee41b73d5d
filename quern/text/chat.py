"""Chat format: a conversation to token ids and a loss mask.

    <|bos|> [<|system_start|> … <|system_end|>]
    <|user_start|> … <|user_end|> <|assistant_start|> … <|assistant_end|>   (repeated)

Inside an assistant's turn, <|tool_start|>expression<|tool_end|> calls the calculator and
<|output_start|>result<|output_end|> holds its output. In conversations only this file inserts special tokens; generate/
runs the tools, and adds the special tokens of their outputs. Content goes through `Tokenizer.encode`, so text that
spells a special token stays text in every role.

The mask is True on the tokens that the model produces: the assistant's text, its tool calls including their special
tokens, and the end of its turn. It is False on system and user messages, on tool outputs, and on what has the weight 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, cast

import numpy as np

from quern.text.tokenizer import Tokenizer


class ContentPart(TypedDict):
    """A piece of a message: plain text, a tool call, or the tool's output. A piece of weight 0 is read, not learned."""

    type: Literal["text", "tool", "output"]
    text: str
    weight: NotRequired[int]


class Message(TypedDict):
    """One turn. Only an assistant's content may hold tool calls and outputs. weight: 0 if its end is not learned."""

    role: Literal["system", "user", "assistant"]
    content: str | list[ContentPart]
    weight: NotRequired[int]


ROLES = ("system", "user", "assistant")
PART_TYPES = ("text", "tool", "output")


def validate(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless the messages are an optional system message, then alternate user and assistant."""
    if not messages:
        raise ValueError("the conversation is empty: give at least one user message")
    turns = 0
    for index, message in enumerate(messages):
        where = f"message {index + 1}"
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise ValueError(f'{where} must be an object with "role" and "content"')
        role = message["role"]
        if role not in ROLES:
            raise ValueError(f"{where} has the role {role!r}: use one of {', '.join(ROLES)}")
        if role == "system" and index > 0:
            raise ValueError(f"{where} is a system message: only the first message may be one")
        if role != "system":
            expected = ROLES[1 + turns % 2]
            if role != expected:
                raise ValueError(
                    f"{where} is from the {role}, expected the {expected}: user and assistant take turns, "
                    "the user first; join neighbouring messages of one role"
                )
            turns += 1
        _validate_content(message["content"], role, where)
    if turns == 0:
        raise ValueError("the conversation has only a system message: add a user message")


def _validate_content(content: object, role: str, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}: content must be text or a list of parts")
    before = None
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise ValueError(f'{where}: each part of the content needs "type" and "text"')
        kind = part.get("type")
        if kind not in PART_TYPES:
            raise ValueError(f"{where}: a part has the type {kind!r}: use one of {', '.join(PART_TYPES)}")
        if kind != "text" and role != "assistant":
            raise ValueError(f"{where}: only the assistant can hold a {kind!r} part, not the {role}")
        if kind == "output" and before != "tool":
            raise ValueError(f"{where}: an output must directly follow the tool call it answers")
        before = kind


def render(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a whole conversation. Returns ids int32 (T,), starting with BOS, and the mask bool (T,)."""
    validate(messages)
    ids: list[int] = [tokenizer.bos]
    mask: list[bool] = [False]

    def add(tokens: Sequence[int], learn: bool) -> None:
        ids.extend(tokens)
        mask.extend([learn] * len(tokens))

    for message in messages:
        role = message["role"]
        mine = role == "assistant"
        add([tokenizer.special(f"<|{role}_start|>")], False)
        for part in parts(message):
            kind = part["type"]
            learn = mine and kind != "output" and part.get("weight") != 0
            tokens = tokenizer.encode(part["text"])
            if kind != "text":
                tokens = [tokenizer.special(f"<|{kind}_start|>"), *tokens, tokenizer.special(f"<|{kind}_end|>")]
            add(tokens, learn)
        add([tokenizer.special(f"<|{role}_end|>")], mine and message.get("weight") != 0)
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Encodes a conversation up to where the model continues: <|assistant_start|> after a user message at its end.

    A conversation may also end with an assistant's text or a tool's output; the assistant's turn goes on behind it.
    """
    ids = render(tokenizer, messages)[0].tolist()
    if messages[-1]["role"] == "user":
        return [*ids, tokenizer.special("<|assistant_start|>")]
    if any(part["type"] == "tool" for part in parts(messages[-1])[-1:]):
        raise ValueError("the last message ends with a tool call: add its output")
    return ids[:-1]


def render_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes the beginning of a document for a base model: BOS, then the text, without the chat format."""
    return [tokenizer.bos, *tokenizer.encode(text)]


def parts(message: Mapping[str, Any]) -> list[ContentPart]:
    """The content as a list of parts, none of which is the message's own; empty for no content."""
    content = message.get("content") or ()
    found = [{"type": "text", "text": content}] if isinstance(content, str) else [{**part} for part in content]
    return cast(list[ContentPart], found)
