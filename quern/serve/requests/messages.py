"""The messages of a chat, from OpenAI's shape to the chat format of quern/text/chat.py.

In that format, a call and its output stand inside the assistant's turn. So an assistant message with `tool_calls`, the
tool messages that answer it, and the assistant message that follows become one turn; a chat that ends with a tool's
output is continued in it.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from quern.serve.requests.errors import Strict, invalid
from quern.text.chat import ContentPart, Message, parts


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
    content: str | list[TextPart] | None = None
    name: str | None = None
    parts: list[ReplyPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Fields of a response message: a client may send it back unchanged.
    refusal: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    def content_parts(self) -> list[ContentPart]:
        """An assistant's text and calls of the calculator."""
        if self.parts is not None:
            return [{"type": part.type, "text": part.text} for part in self.parts]
        return [{"type": "text", "text": self.text}] if self.text else []


def written_call(name: str, arguments: str) -> str:
    """A call as the model writes it. arguments: a JSON object."""
    return json.dumps({"name": name, "arguments": json.loads(arguments)}, separators=(",", ":"), ensure_ascii=False)


def turns(messages: Sequence[ChatMessage], tools: str = "") -> list[Message]:
    """The conversation in the chat format. tools: text that is added to the system message.

    Raises:
        ApiError: A message lacks what its role needs, or a call and its output do not belong together.
    """
    found: list[Message] = []
    open_calls: dict[str, str] = {}  # calls without an output, by id
    if tools and messages[0].role not in ("system", "developer"):
        found.append({"role": "system", "content": tools})
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role == "tool":
            call = open_calls.pop(message.tool_call_id or "", None)
            if call is None:
                raise invalid(f"{where}.tool_call_id", "it must be the id of a call of the assistant message before")
            found[-1] = _longer(found[-1], [{"type": "tool", "text": call}, {"type": "output", "text": message.text}])
            continue
        if open_calls:
            raise invalid(where, f"the call '{next(iter(open_calls))}' has no tool message with its output yet")
        if message.tool_call_id is not None:
            raise invalid(f"{where}.tool_call_id", "only a tool message has one")
        if message.role == "assistant":
            open_calls = _calls(message, where)
            if message.content is None and not message.parts and not open_calls:
                raise invalid(f"{where}.content", "send a text, or tool_calls")
            own = message.content_parts()
            if found and _ends_with_output(found[-1]):
                found[-1] = _longer(found[-1], own)
            else:
                text = message.text if message.parts is None and not open_calls else own
                found.append({"role": "assistant", "content": text})
            continue
        if message.content is None or message.tool_calls is not None:
            raise invalid(where, f"a {message.role} message has 'content' and no 'tool_calls'")
        role = "user" if message.role == "user" else "system"
        text = f"{message.text}\n\n{tools}" if tools and number == 0 and role == "system" else message.text
        found.append({"role": role, "content": text})
    if open_calls:
        raise invalid("messages", f"the call '{next(iter(open_calls))}' has no tool message with its output yet")
    return found


def _calls(message: ChatMessage, where: str) -> dict[str, str]:
    calls = {}
    for number, call in enumerate(message.tool_calls or []):
        param = f"{where}.tool_calls[{number}]"
        if call.id in calls:
            raise invalid(f"{param}.id", "another call has it too")
        try:
            calls[call.id] = written_call(call.function.name, call.function.arguments)
        except (ValueError, RecursionError):
            raise invalid(f"{param}.function.arguments", "it is not JSON") from None
    return calls


def _ends_with_output(message: Message) -> bool:
    content = message["content"]
    return not isinstance(content, str) and bool(content) and content[-1]["type"] == "output"


def _longer(message: Message, more: list[ContentPart]) -> Message:
    return {"role": message["role"], "content": [*parts(message), *more]}
