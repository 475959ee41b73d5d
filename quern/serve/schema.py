"""The wire format of `/v1/chat/completions`: requests and responses.

Field names and error shapes are those of OpenAI's API, so its clients work unchanged. A parameter that the API does not
define, or that this server does not support, is refused by name. Two kinds of fields are additions: the fields of
`Sampling` that the API lacks (top_k, min_p), and `parts`, which holds the calculator's calls and their outputs in an
assistant message and in a stream's delta.

Source: https://platform.openai.com/docs/api-reference/chat
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from quern.bounds import BOUNDS, Bounds
from quern.generate.reply import Completion
from quern.generate.sample import Sampling
from quern.text.chat import ContentPart, Message

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 200
_NO_TOOLS = "the model calls its own calculator and no other tool: leave it out"
_NO_LOGPROBS = "this server gives no log probabilities: leave it out"
_NO_PENALTY = "this server has no penalties: leave it out, or send 0"
# The correct usage of a parameter, where pydantic's message does not name it.
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
    """An error for the client, in OpenAI's shape: {"error": {message, type, param, code}}."""

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
    # Fields of a response message: a client may send it back unchanged.
    refusal: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = Field(default=None, max_length=0)

    def message(self) -> Message:
        """The message in the chat format of quern/text/chat.py."""
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


OWN_BOUNDS = {"temperature": Bounds(0, 2)}
"""Ranges of OpenAI's API that are narrower than those of quern/bounds.py."""


def _field_of(name: str, kind: Any) -> tuple[Any, Any]:
    """A field of `Sampling` as a pydantic field with the same range; null means the default."""
    bounds = OWN_BOUNDS.get(name) or BOUNDS[name]
    limits: dict[str, Any] = {"gt" if bounds.above else "ge": bounds.low, "lt" if bounds.below else "le": bounds.high}
    return kind | None, Field(default=None, **limits)


_SAMPLING_FIELDS: dict[str, Any] = {f.name: _field_of(f.name, f.type) for f in fields(Sampling)}
_SamplingRequest = create_model("_SamplingRequest", __base__=_Strict, **_SAMPLING_FIELDS)


class ChatRequest(_SamplingRequest):
    """A request, with the fields of `Sampling`. The fields after `stop` are accepted only with their default effect."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
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

    @property
    def sampling(self) -> Sampling:
        given = {f.name: getattr(self, f.name) for f in fields(Sampling)}
        return Sampling(**{name: value for name, value in given.items() if value is not None})

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def limit(self, context: int) -> int:
        """The most tokens in the reply; the engine also ends the reply at the end of the context."""
        return min(self.max_completion_tokens or self.max_tokens or context, context)


def parse_request(body: Any) -> ChatRequest:
    """Validates a decoded JSON body. Raises ApiError, which names the first wrong parameter."""
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
            # Skip the names of a union's branches: they are not part of the path.
            param += f".{place}" if param else place
    if first["type"] == "extra_forbidden":
        return ApiError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    where = f"for '{param}'" if param else "in the body"
    # Inside messages, pydantic's message is specific enough.
    name = param if param.startswith("messages") else re.split(r"[.\[]", param)[0]
    why = INSTEAD.get(name, first["msg"])
    return ApiError(f"Invalid value {where}: {why}.", param=param or None, code="invalid_value")


def usage(replies: Sequence[Completion]) -> dict[str, int]:
    """Tokens of the prompt, counted once, and of all replies together."""
    prompt, completion = replies[0].prompt_tokens, sum(len(reply.ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def assistant_message(text: str, parts: Sequence[ContentPart]) -> dict[str, Any]:
    """The message of a reply; it has `parts` only if the calculator was called."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if any(part["type"] != "text" for part in parts):
        message["parts"] = list(parts)
    return message


def completion_body(
    kind: str, identifier: str, created: int, model: str, choices: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A response, or one chunk of a stream. kind: its `object`; more: further fields, such as `usage`."""
    return {"id": identifier, "object": kind, "created": created, "model": model, "choices": choices, **more}


def choice(index: int, finish_reason: str | None = None, **content: Any) -> dict[str, Any]:
    """content: `message`, or `delta` in a stream."""
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def model_body(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "quern"}
