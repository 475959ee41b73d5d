"""The requests of the API: `/v1/chat/completions`, `/v1/completions`, `/tokenize`, `/detokenize`.

Field names and error shapes are those of OpenAI's API, so its clients work unchanged. A parameter that the API does not
define, or that this server does not support, is refused by name. Additions are the fields of `Sampling` that the API
lacks (top_k, min_p, repetition_penalty), `stop_token_ids`, and `parts`, which holds the calculator's calls and their
outputs in an assistant message and in a stream's delta. The responses are in answers.py.

Sources: https://platform.openai.com/docs/api-reference/chat, https://platform.openai.com/docs/api-reference/completions;
https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ for the additions and for tokenizing.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from quern.bounds import BOUNDS, Bounds
from quern.generate.sample import Sampling
from quern.text.chat import ContentPart, Message

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 200
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 32
_NO_TOOLS = "the model calls its own calculator and no other tool: leave it out"
# The correct usage of a parameter, where pydantic's message does not name it.
INSTEAD = {
    "messages": 'send at least one message, [{"role": "user", "content": "…"}]',
    "stop": f"give a text or up to {MAX_STOPS} of them, each of 1 to {MAX_STOP_CHARACTERS} characters",
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "logit_bias": 'give token ids with numbers from -100 to 100, {"50": -100}',
    "suffix": "the model continues texts and fills no gaps: leave it out",
    "best_of": "every choice is returned: leave it out and set 'n'",
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
_Id = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]

OWN_BOUNDS = {"temperature": Bounds(0, 2)}
"""Ranges of OpenAI's API that are narrower than those of quern/bounds.py."""


def _field_of(name: str, kind: Any) -> tuple[Any, Any]:
    """A field of `Sampling` as a pydantic field with the same range; null means the default."""
    bounds = OWN_BOUNDS.get(name) or BOUNDS[name]
    limits: dict[str, Any] = {"gt" if bounds.above else "ge": bounds.low, "lt" if bounds.below else "le": bounds.high}
    return kind | None, Field(default=None, **limits)


_SAMPLING_FIELDS: dict[str, Any] = {f.name: _field_of(f.name, f.type) for f in fields(Sampling)}
_SamplingRequest = create_model("_SamplingRequest", __base__=_Strict, **_SAMPLING_FIELDS)


class _Generating(_SamplingRequest):
    """What requests for a reply have in common."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=64)
    logit_bias: dict[_Id, _Bias] | None = Field(default=None, max_length=1024)
    user: str | None = None

    @property
    def sampling(self) -> Sampling:
        given = {f.name: getattr(self, f.name) for f in fields(Sampling)}
        return Sampling(**{name: value for name, value in given.items() if value is not None})

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def bias(self) -> dict[int, float]:
        return {int(token): value for token, value in (self.logit_bias or {}).items()}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Generating):
    """A chat. The fields after `top_logprobs` are accepted only with their default effect."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    response_format: ResponseFormat | None = None
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def limit(self, context: int) -> int:
        """The most tokens in the reply; the engine also ends the reply at the end of the context."""
        return min(self.max_completion_tokens or self.max_tokens or context, context)

    def top(self) -> int | None:
        """How many of the likeliest tokens are told; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


_Ids = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(_Generating):
    """A text, or its token ids, to be continued; or a list of them."""

    prompt: str | _Ids | Annotated[list[str | _Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    # 0 is of use with `echo` only: the prompt's own log-probabilities.
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    suffix: None = None
    best_of: Literal[1] | None = None

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class TokenizeRequest(_Strict):
    """A text, or a chat as the model reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: list[int]


Request = TypeVar("Request", bound=BaseModel)


def parse_request(kind: type[Request], body: Any) -> Request:
    """Validates a decoded JSON body. Raises ApiError, which names the first wrong parameter."""
    if not isinstance(body, dict):
        required = [f"'{name}'" for name, field in kind.model_fields.items() if field.is_required()]
        raise ApiError(f"The body must be a JSON object with {' and '.join(required) or 'the parameters'}.")
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None
    if isinstance(request, _Generating) and request.stream_options is not None and not request.stream:
        raise _only_with("stream_options", "stream")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise _only_with("top_logprobs", "logprobs")
    if isinstance(request, CompletionRequest) and request.max_tokens == 0 and not request.echo:
        raise ApiError("'max_tokens' may be 0 only with 'echo'.", param="max_tokens", code="invalid_value")
    return request


def _only_with(name: str, other: str) -> ApiError:
    return ApiError(f"'{name}' is only allowed when '{other}' is true.", param=name, code="invalid_value")


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
