"""Converts conversations of other projects to quern's format (chat.py).

    quern, OpenAI   {"messages": [{"role": "user", "content": "…"}, …]}, or the list alone
    ShareGPT        {"conversations": [{"from": "human", "value": "…"}, …]}
    Alpaca          {"instruction": "…", "input": "…", "output": "…"}

OpenAI's `tool_calls` and `tool` messages become parts of one assistant turn: the call, its output, the text that
follows. A call of the function `calculator` becomes its expression, which is the input of quern's tool; any other call
becomes {"name": …, "arguments": …}. documents.py reads the files.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

from quern.text.chat import ContentPart, Message, validate

KEYS = ("messages", "conversations", "instruction", "input", "output", "system")
"""The keys that are read from a record."""
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
CALCULATOR = "calculator"


def to_messages(record: Any) -> list[Message]:
    """Converts a JSON value in one of the shapes above to messages that pass `chat.validate`.

    Raises:
        ValueError: The record has another shape or is not a valid conversation.
    """
    if isinstance(record, Mapping):
        turns = next((record[key] for key in ("messages", "conversations") if record.get(key) is not None), None)
        if turns is None and record.get("instruction") is not None and record.get("output") is not None:
            turns = _of_alpaca(record)
    else:
        turns = record
    if not isinstance(turns, list):
        raise ValueError(no_shape(record.keys() if isinstance(record, Mapping) else ()))
    messages = _join_tools(_of_sharegpt(turn, index) for index, turn in enumerate(turns))
    validate(messages)
    # Drop other keys of data sets, such as ids and sources.
    return [cast(Message, {"role": message["role"], "content": message["content"]}) for message in messages]


def no_shape(names: Iterable[str]) -> str:
    """The message for a record with these keys that is not a conversation."""
    there_are = ", ".join(map(repr, list(names)[:12]))
    return (
        f"{f'it has only {there_are}' if there_are else 'it is no object and no list of messages'}: a conversation is "
        '{"messages": [{"role": "user", "content": …}, …]}, ShareGPT\'s {"conversations": [{"from": "human", "value": '
        '…}, …]} or Alpaca\'s {"instruction": …, "input": …, "output": …}'
    )


def _of_alpaca(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    question = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
    return [{"role": "system", "content": record["system"]}, *turns] if record.get("system") else turns


def _of_sharegpt(turn: Any, index: int) -> Any:
    """{"from", "value"} as {"role", "content"}; other turns unchanged."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    if turn["from"] not in SHAREGPT:
        raise ValueError(f"message {index + 1} is from {turn['from']!r}: use one of {', '.join(SHAREGPT)}")
    return {"role": SHAREGPT[turn["from"]], "content": turn.get("value")}


def _join_tools(turns: Iterable[Any]) -> list[Any]:
    """Joins tool calls, their outputs and the text after them into one assistant turn."""
    messages: list[Any] = []
    parts: list[ContentPart] | None = None  # of the current assistant turn with tool calls
    waiting: list[tuple[str | None, ContentPart]] = []  # (id, call) without an output yet
    for index, turn in enumerate(turns):
        role = turn.get("role") if isinstance(turn, Mapping) else None
        if role == "tool":
            if parts is None or not waiting:
                raise ValueError(f"message {index + 1} is a tool's output, and no tool_calls before it ask for one")
            asked = next((call for call in waiting if call[0] == turn.get("tool_call_id")), waiting[0])
            waiting.remove(asked)
            at = next(i for i, part in enumerate(parts) if part is asked[1])
            parts.insert(at + 1, {"type": "output", "text": "".join(part["text"] for part in _parts(turn))})
        elif role == "assistant" and (turn.get("tool_calls") or parts is not None):
            if parts is None:
                parts = []
                messages.append({"role": "assistant", "content": parts})
            parts += _parts(turn)
            waiting = [(call.get("id"), {"type": "tool", "text": _call(call)}) for call in turn.get("tool_calls") or ()]
            parts += [part for _, part in waiting]
        else:
            parts, waiting = None, []
            messages.append(turn)
    return messages


def _parts(turn: Mapping[str, Any]) -> list[ContentPart]:
    content = turn.get("content")
    if isinstance(content, list):
        return list(content)
    return [{"type": "text", "text": content}] if content else []


def _call(call: Mapping[str, Any]) -> str:
    """The text of a call {"function": {"name": …, "arguments": …}}; the arguments may be a string of JSON."""
    name, arguments = call["function"]["name"], call["function"].get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # a string that is not JSON is the argument itself
            arguments = json.loads(arguments)
    values = list(arguments.values()) if isinstance(arguments, Mapping) else [arguments]
    if name == CALCULATOR and len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
