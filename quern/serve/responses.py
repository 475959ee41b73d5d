"""`/v1/responses`, for text and calls of functions: a request becomes a chat, whose answer gets the shape of this path.

The server keeps no responses: a request brings its whole conversation. Source:
https://platform.openai.com/docs/api-reference/responses and /responses-streaming.
"""

import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quern.serve.answers import Chat, encode, server_sent
from quern.serve.schema import MAX_TOOLS, ChatRequest, Items, JsonSchema, Name, Strict, Tokens, failure, parse_request

NAMES = {
    r"^messages$": "input",
    r"^max_(completion_)?tokens$": "max_output_tokens",
    r"^response_format(\.json_schema)?": "text.format",
    r"\.function\b": "",
    r"\.(tool_call_)?id$": ".call_id",
}
"""Fields of a chat, and what they are called here."""

STORED = "nothing is stored: send the whole conversation in 'input'"


class Part(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Items[Any] | None = Field(default=None, max_length=0)
    logprobs: Items[Any] | None = None


class _Item(Strict):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[Part]
    phase: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[Part]


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Strict):
    format: PlainFormat | SchemaFormat | None = None


class FunctionTool(Strict):
    type: Literal["function"]  # the first field, so that a tool of another kind is refused by its kind
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Strict):
    type: Literal["function"]
    name: Name


class ResponsesRequest(Strict):
    """The fields after `tool_choice` are accepted only with their default effect."""

    instead: ClassVar[Mapping[str, str]] = {
        "input": 'give a text or at least one message, [{"role": "user", "content": "…"}]',
        "include": "a reply has all that there is: leave it out",
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), STORED),
    }
    model: str
    input: str | Annotated[Items[MessageItem | CallItem | OutputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
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
    conversation: None = None
    prompt: None = None
    user: str | None = None

    def chat(self) -> ChatRequest:
        """The chat that this asks for. Raises ApiError for a value that a chat cannot have."""
        body: dict[str, Any] = {"model": self.model, "messages": self._messages()[0]}
        body |= {"temperature": self.temperature, "top_p": self.top_p, "stream": self.stream}
        body |= {"max_completion_tokens": self.max_output_tokens, "tool_choice": self.tool_choice}
        if isinstance(self.tool_choice, NamedChoice):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        form = None if self.text is None else self.text.format
        if form is not None:
            named = isinstance(form, SchemaFormat)
            own = {"json_schema": {"name": form.name, "schema": form.schema_}} if named else {}
            body["response_format"] = {"type": form.type, **own}
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}) for tool in self.tools]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
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
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                calls = found[-1].setdefault("tool_calls", [])
                sources[f"messages[{len(found) - 1}].tool_calls[{len(calls)}]"] = f"input[{number}]"
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            elif isinstance(item, OutputItem):
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            else:
                found.append({"role": item.role, "content": _text(item.content)})
            sources.setdefault(f"messages[{len(found) - 1}]", f"input[{number}]")
        return found, sources


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Responses:
    """The response to one request, made from the answer of its chat."""

    def __init__(self, request: ResponsesRequest, answer: Chat) -> None:
        self.job, self._request, self._answer = answer.job, request, answer
        self._id, self._message_id, self._call_id = (f"{kind}_{uuid.uuid4().hex}" for kind in ("resp", "msg", "fc"))

    async def whole(self) -> str:
        """The complete response as JSON. Raises ApiError if the job fails."""
        await self._answer.finish()
        return encode(self._body(self._finished()))

    async def stream(self) -> AsyncIterator[str]:
        """The events of a stream; the last one is response.completed, response.incomplete or response.failed."""
        number = -1

        def event(kind: str, **content: Any) -> str:
            nonlocal number
            number += 1
            kind = f"response.{kind}"
            return f"event: {kind}\n" + server_sent({"type": kind, "sequence_number": number, **content})

        place: dict[str, Any] = {"item_id": self._message_id, "output_index": 0, "content_index": 0}

        def begin() -> str:
            item = self._message("", "in_progress")
            added = event("output_item.added", output_index=0, item={**item, "content": []})
            return added + event("content_part.added", **place, part=item["content"][0])

        begun = False
        try:
            started = self._body([], "in_progress")
            yield event("created", response=started) + event("in_progress", response=started)
            async for events in self.job.batches():
                for _, delta, _ in self._answer.take(events):
                    if delta is not None and delta.kind == "text":
                        if not begun:
                            begun = True
                            yield begin()
                        yield event("output_text.delta", **place, delta=delta.text, logprobs=[])
            for index, item in enumerate(items := self._finished()):
                if item["type"] == "function_call":
                    where = {"item_id": self._call_id, "output_index": index}
                    name, arguments = item["name"], item["arguments"]
                    empty = {**item, "arguments": "", "status": "in_progress"}
                    yield event("output_item.added", output_index=index, item=empty)
                    yield event("function_call_arguments.delta", **where, delta=arguments)
                    yield event("function_call_arguments.done", **where, name=name, arguments=arguments)
                else:
                    if not begun:  # an empty reply
                        yield begin()
                    [part] = item["content"]
                    yield event("output_text.done", **place, text=part["text"], logprobs=[])
                    yield event("content_part.done", **place, part=part)
                yield event("output_item.done", output_index=index, item=item)
            body = self._body(items)
            yield event(body["status"], response=body)
        except Exception as error:
            failed = {"code": "server_error", "message": failure(error).body["error"]["message"]}
            yield event("failed", response=self._body([], "failed") | {"error": failed})

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.choices[0].finish_reason == "length" else "completed"

    def _finished(self) -> list[dict[str, Any]]:
        choice = self._answer.choices[0]
        shape = {"type": "function_call", "id": self._call_id, "status": "completed"}
        calls = [{**call["function"], **shape, "call_id": call["id"]} for call in choice.called]
        return ([self._message(choice.text, self._status)] if choice.text or not calls else []) + calls

    def _message(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "message", "id": self._message_id, "role": "assistant", "status": status, "content": [part]}

    def _body(self, output: list[dict[str, Any]], status: str | None = None) -> dict[str, Any]:
        request, usage = self._request, None
        if self._answer.choices[0].completion is not None:
            counts = self._answer.usage()
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            }
        told = {"instructions", "max_output_tokens", "metadata", "temperature", "top_p", "tools", "tool_choice"}
        given, status = request.model_dump(include=told, by_alias=True), status or self._status
        return {
            **given,
            "id": self._id,
            "object": "response",
            "created_at": self._answer.created,
            "model": self._answer.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": usage,
            "tools": given["tools"] or [],
            "tool_choice": given["tool_choice"] or "auto",
            "parallel_tool_calls": False,
            "store": False,
        }
