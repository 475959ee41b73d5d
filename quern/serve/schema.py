"""The wire format of `/v1/chat/completions`: what a request may hold, and the objects of an answer.

Field names and error shapes are those of OpenAI's API, so that its clients work unchanged. A parameter that
the API does not know, or that this server cannot honour, is refused and named. One field is our own: `parts`,
in an assistant's message and in a stream's delta, holds the calls of the calculator and their outputs.

Source: https://platform.openai.com/docs/api-reference/chat
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quern.text.chat import ContentPart, Message

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 200
_NO_TOOLS = "the model calls its own calculator and no other tool: leave it out"
_NO_LOGPROBS = "this server gives no log probabilities: leave it out"
_NO_PENALTY = "this server has no penalties: leave it out, or send 0"
# What to do instead, where pydantic knows only what was wrong.
INSTEAD = {
    "messages": 'send at least one message, [{"role": "user", "content": "…"}]',
    "stop": f"give a text or up to {MAX_STOPS} of them, each of 1 to {MAX_STOP_CHARACTERS} characters",
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "logprobs": _NO_LOGPROBS,
    "top_logprobs": _NO_LOGPROBS,
    "frequency_penalty": _NO_PENALTY,
    "presence_penalty": _NO_PENALTY,
    "logit_bias": "this server does not bias tokens: leave it out",
    "response_format": 'replies are plain text: leave it out, or send {"type": "text"}',
}


class ApiError(Exception):
    """An error that the client sees, in OpenAI's shape: {"error": {message, type, param, code}}."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code, **(extra or {})}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ReplyPart(_Strict):
    type: Literal["text", "tool", "output"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    parts: list[ReplyPart] | None = None
    # What this server's answers and OpenAI's carry, so that an answer can be sent back as it came.
    refusal: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = Field(default=None, max_length=0)

    def message(self) -> Message:
        """As the chat format takes it."""
        if self.parts is not None and self.role == "assistant":
            parts: list[ContentPart] = [{"type": part.type, "text": part.text} for part in self.parts]
            return {"role": "assistant", "content": parts}
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text"]


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Zero = Annotated[float, Field(ge=0, le=0)]


class ChatRequest(_Strict):
    """A request; the fields after `stop` are known and accepted only where they ask for nothing."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None

    frequency_penalty: _Zero | None = None
    presence_penalty: _Zero | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0)
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def limit(self, context: int) -> int:
        """Tokens the reply may have; the engine also ends it where the context ends."""
        return min(self.max_completion_tokens or self.max_tokens or context, context)


def parse_request(body: Any) -> ChatRequest:
    """A decoded JSON body → a request. Raises ApiError, which names the first parameter at fault."""
    if not isinstance(body, dict):
        raise ApiError("The body must be a JSON object with 'model' and 'messages'.")
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            "'stream_options' is only allowed when 'stream' is true.",
            param="stream_options",
            code="invalid_value",
        )
    return request


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for place in first["loc"]:
        if isinstance(place, int):
            param += f"[{place}]"
        elif (place.isidentifier() and place != "str") or not param:
            # The names of a union's branches are not part of the path.
            param += f".{place}" if param else place
    if first["type"] == "extra_forbidden":
        return ApiError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    where = f"for '{param}'" if param else "in the body"
    # Inside of messages, what was wrong says enough.
    name = param if param.startswith("messages") else re.split(r"[.\[]", param)[0]
    why = INSTEAD.get(name, first["msg"])
    return ApiError(f"Invalid value {where}: {why}.", param=param or None, code="invalid_value")


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def assistant_message(text: str, parts: Sequence[ContentPart]) -> dict[str, Any]:
    """A reply's message; `parts` only where the calculator was called."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if any(part["type"] != "text" for part in parts):
        message["parts"] = list(parts)
    return message


def completion_body(
    identifier: str, created: int, model: str, choices: list[dict[str, Any]], used: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": identifier,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": used,
    }


def choice(index: int, message: dict[str, Any], finish_reason: str) -> dict[str, Any]:
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}


def delta(index: int, value: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": value, "logprobs": None, "finish_reason": finish_reason}


def models_body(name: str, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_body(name, created)]}


def model_body(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "quern"}
