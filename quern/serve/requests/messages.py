"""The messages of a chat, from OpenAI's shape to the chat format of quern/text/chat.py.

The conversion is that of fine-tuning, text/conversations.py, so that a model reads what it was trained on. Here a
message that lacks something is refused by name, and any order of roles becomes one that is trained. A chat that ends
with the assistant's text or a tool's output is continued in the same turn.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from quern.serve.requests.errors import Items, Strict, invalid
from quern.serve.requests.forms import Tool
from quern.text.chat import Message
from quern.text.conversations import to_messages


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ReplyPart(Strict):
    type: Literal["text", "tool", "output"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    parts: Items[ReplyPart] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    # Fields of a response message: a client may send it back unchanged.
    refusal: None = None
    annotations: Items[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None


def turns(messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[Message]:
    """The conversation in the chat format. tools: described in the system message.

    Raises:
        ApiError: A message lacks what its role needs, or a call and its output do not belong together.
        ValueError: The messages are no conversation.
    """
    open_calls: set[str] = set()  # calls without an output, by id
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                raise invalid(f"{where}.tool_call_id", "it must be the id of a call before it, without an output yet")
            open_calls.remove(message.tool_call_id)
            continue
        if open_calls:
            raise invalid(where, f"the call '{min(open_calls)}' has no output yet")
        if message.tool_call_id is not None:
            raise invalid(f"{where}.tool_call_id", "only a tool message has one")
        if message.role == "assistant":
            open_calls = _calls(message, where)
            if message.content is None and not message.parts and not open_calls:
                raise invalid(f"{where}.content", "send a text, or tool_calls")
        elif message.content is None or message.tool_calls is not None:
            raise invalid(where, f"a {message.role} message has 'content' and no 'tool_calls'")
    if open_calls:
        raise invalid("messages", f"the call '{min(open_calls)}' has no output yet")
    record = _in_turns([message.model_dump() for message in messages])
    return to_messages({"messages": record, "tools": [tool.model_dump() for tool in tools]})


def _in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the order that models are trained on: a system message, then the user and the assistant in turn.

    Every system message joins the first one, and a message joins the one before it of the same role, each as a
    paragraph. An empty message of the user begins a chat in which the user says nothing first.
    """
    system: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        message["content"] = message["parts"] or message["content"] or ""
        if isinstance(message["content"], list) and not message["parts"]:
            message["content"] = "".join(part["text"] for part in message["content"])
        into = system if message["role"] in ("system", "developer") else turns
        before = into[-1] if into else None
        if before is None or (into is turns and (before["role"] != message["role"] or message["role"] == "tool")):
            into.append(message)
        else:
            before["content"] = _joined(before["content"], message["content"])
            before["tool_calls"] = message["tool_calls"]  # the one before has none: they would lack their outputs
    silent = [] if turns and turns[0]["role"] == "user" else [{"role": "user", "content": ""}]
    return [*system, *silent, *turns]


def _joined(one: Any, other: Any) -> Any:
    """Two contents as paragraphs of one, each a text or a list of parts."""
    if isinstance(one, str) and isinstance(other, str):
        return "\n\n".join(filter(None, (one, other)))
    both = [[{"type": "text", "text": own}] if isinstance(own, str) else own for own in (one, other)]
    return [*both[0], {"type": "text", "text": "\n\n"}, *both[1]]


def _calls(message: ChatMessage, where: str) -> set[str]:
    """The ids of a message's calls."""
    ids: set[str] = set()
    for number, call in enumerate(message.tool_calls or []):
        param = f"{where}.tool_calls[{number}]"
        if call.id in ids:
            raise invalid(f"{param}.id", "another call has it too")
        try:
            json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid(f"{param}.function.arguments", "it is not JSON") from None
        ids.add(call.id)
    return ids
