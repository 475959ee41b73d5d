"""The request of `/v1/responses`, translated to the chat that it asks for. The answer is in serve/responses.py.

Source: https://platform.openai.com/docs/api-reference/responses
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from quern.serve.requests.errors import Items, Strict
from quern.serve.requests.forms import MAX_TOOLS, Name
from quern.serve.requests.schema import ChatRequest, parse_request

NAMES = {
    r"^messages$": "input",
    r"^max_(completion_)?tokens$": "max_output_tokens",
    r"^response_format(\.json_schema)?": "text.format",
    r"\.function\b": "",
    r"\.(tool_call_)?id$": ".call_id",
}
"""Fields of a chat, and what they are called here."""
TEXT_TYPES = Literal["input_text", "output_text", "text"]


class Part(Strict):
    type: TEXT_TYPES
    text: str
    annotations: Items[Any] | None = Field(default=None, max_length=0)
    logprobs: Items[Any] | None = None


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[Part]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class OutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[Part]
    id: str | None = None
    status: str | None = None


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: PlainFormat | SchemaFormat | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Strict):
    type: Literal["function"]
    name: Name


class ResponsesRequest(Strict):
    """The fields after `tool_choice` are accepted only with their default effect."""

    model: str
    input: str | Annotated[Items[MessageItem | CallItem | OutputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Items[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None

    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: Items[str] | None = Field(default=None, max_length=0)
    previous_response_id: None = None
    user: str | None = None

    def chat(self) -> ChatRequest:
        """The chat that this asks for. Raises ApiError for a value that a chat cannot have."""
        body: dict[str, Any] = {"model": self.model, "messages": self._messages()[0]}
        body |= {"temperature": self.temperature, "top_p": self.top_p, "stream": self.stream}
        body["max_completion_tokens"] = self.max_output_tokens
        form = None if self.text is None else self.text.format
        if form is not None:
            named = isinstance(form, SchemaFormat)
            own = {"json_schema": {"name": form.name, "schema": form.schema_}} if named else {}
            body["response_format"] = {"type": form.type, **own}
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}) for tool in self.tools]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        if isinstance(self.tool_choice, NamedChoice):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        else:
            body["tool_choice"] = self.tool_choice
        return parse_request(ChatRequest, body)

    def name_of(self, param: str) -> str:
        """This request's name of a parameter of its chat."""
        sources = self._messages()[1]
        place = max((one for one in sources if param.startswith(one)), key=len, default="")
        param = sources.get(place, "") + param[len(place) :]
        for theirs, own in NAMES.items():
            param = re.sub(theirs, own, param)
        return param

    def _messages(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The messages of the chat, and what each of them and each of their calls comes from."""
        found: list[dict[str, Any]] = []
        sources: dict[str, str] = {}
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
            sources["messages[0]"] = "instructions"
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}], sources | {f"messages[{len(found)}]": "input"}
        for number, item in enumerate(self.input):
            if isinstance(item, CallItem):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                calls = found[-1].setdefault("tool_calls", [])
                sources[f"messages[{len(found) - 1}].tool_calls[{len(calls)}]"] = f"input[{number}]"
                calls.append(call)
            elif isinstance(item, OutputItem):
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            else:
                found.append({"role": item.role, "content": _text(item.content)})
            sources.setdefault(f"messages[{len(found) - 1}]", f"input[{number}]")
        return found, sources


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
