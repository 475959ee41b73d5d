"""The requests of the API: fields, ranges, and the error for a wrong one. responses.py has those of `/v1/responses`.

Field names and error shapes follow OpenAI's API, so its clients work unchanged. A wrong value is refused by the name of
its field; unknown fields are ignored. Additions are the fields of `Sampling` that the API lacks (top_k, min_p,
repetition_penalty), `stop_token_ids`, `structured_outputs` (json, regex or choice), and `parts`, which holds the
calculator's calls and their outputs in an assistant message and in a stream's delta.

Sources: https://platform.openai.com/docs/api-reference/chat, https://platform.openai.com/docs/api-reference/completions;
https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ for the additions and for tokenizing.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from quern.field_types import annotations_of
from quern.generate.sampling import Sampling

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 200
MAX_TOOLS = 64
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 32
MAX_TOKENS = 1 << 16
MOST_ERRORS = 100
"""The errors of a request among which the one to report is searched: pydantic may find thousands."""
INSTEAD = {
    "messages": 'send at least one message, [{"role": "user", "content": "…"}]',
    "stop": f"give a text or up to {MAX_STOPS} of them, each of 1 to {MAX_STOP_CHARACTERS} characters",
    "tools": f"give up to {MAX_TOOLS} functions, "
    '{"type": "function", "function": {"name": "…", "parameters": {…}}}',
    "tool_choice": 'it is "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}',
    "logit_bias": 'give token ids with numbers from -100 to 100, {"50": -100}',
    "suffix": "the model continues texts and fills no gaps: leave it out",
    "best_of": "every choice is returned: leave it out and set 'n'",
    "response_format": 'it is {"type": "text"}, {"type": "json_object"} or '
    '{"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}',
    "structured_outputs": 'give one of {"json": schema}, {"regex": "…"} and {"choice": ["…", …]}',
}


class ApiError(Exception):
    """An error for the client, in OpenAI's shape: {"error": {message, type, param, code}}.

    Args:
        message: A sentence.
        status: The HTTP status.
        kind: OpenAI's type of the error.
        param: The wrong field.
        code: OpenAI's code.
        retry_after: Seconds after which a request with status 429 or 503 may be repeated.
        extra: Further fields.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 1,
        **extra: Any,
    ):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code, **extra}}

    def renamed(self, rename: Callable[[str], str]) -> "ApiError":
        """The error with another name for its parameter."""
        told, param = self.body["error"], self.body["error"]["param"]
        if param is not None:
            told["param"] = rename(param)
            told["message"] = told["message"].replace(f"'{param}'", f"'{told['param']}'")
        return self


def as_api_error(error: BaseException) -> ApiError:
    """The error for the client; 500 for an unexpected one."""
    if isinstance(error, ApiError):
        return error
    return ApiError("The server failed on this request.", status=500, kind="server_error")


def failure(error: Exception) -> ApiError:
    """`as_api_error` of an error that nobody else reports: the server's log gets an unexpected one."""
    if not isinstance(error, ApiError):
        logging.getLogger("uvicorn.error").error("A request failed", exc_info=error)
    return as_api_error(error)


def invalid(param: str, why: object) -> ApiError:
    """The error for a parameter with a wrong value."""
    return ApiError(f"Invalid value for '{param}': {why}.", param=param, code="invalid_value")


class Strict(BaseModel):
    """A part of a request: no value is converted; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    """The correct usage of a parameter, where pydantic's message does not name it."""


Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose validation ends with the first wrong item: an error for each of 100,000 takes seconds to build."""
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Tokens = Annotated[int, Interval(ge=1)]


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
    content: str | Items[str | TextPart] | None = None
    name: str | None = None
    parts: Items[ReplyPart] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    # Fields of a response message: a client may send it back unchanged.
    refusal: None = None
    annotations: Items[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None


class JsonSchema(Strict):
    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """Exactly one of these."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    choice: Annotated[Items[Annotated[str, Field(min_length=1)]] | None, Field(min_length=1, max_length=1024)] = None


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Id = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Interval(ge=-100, le=100)]
_Ids = Annotated[Items[int], Field(min_length=1)]
_OWN = {"temperature": Annotated[float, Interval(ge=0, le=2)]}
"""Fields whose range is narrower in OpenAI's API than in `Sampling`."""
_SAMPLING_FIELDS: dict[str, Any] = {
    name: (kind | None, None) for name, kind in {**annotations_of(Sampling), **_OWN}.items()
}
"""The fields of `Sampling` with their ranges; null means the default."""
_SamplingRequest = create_model("_SamplingRequest", __base__=Strict, **_SAMPLING_FIELDS)


class Generating(_SamplingRequest):
    """The fields that requests for a reply share."""

    model: str
    max_tokens: Tokens | None = None
    n: Annotated[int, Interval(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Interval(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[Items[_Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Items[int] | None = Field(default=None, max_length=64)
    logit_bias: dict[_Id, _Bias] | None = Field(default=None, max_length=1024)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.model_dump(include={f.name for f in fields(Sampling)}, exclude_none=True))

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Generating):
    """A chat. The fields after `tool_choice` are accepted only with their default effect."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Items[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None

    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Generating):
    """A text, or its token ids, to be continued; or a list of them."""

    instead: ClassVar[Mapping[str, str]] = INSTEAD | {
        "prompt": f"give a text, its token ids, or a list of 1 to {MAX_PROMPTS} of them"
    }
    prompt: str | _Ids | Annotated[Items[str | _Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    # 0 is of use with `echo` only: the prompt's own log-probabilities.
    max_tokens: Annotated[int, Interval(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(Any, [self.prompt] if one else self.prompt)


class TokenizeRequest(Strict):
    """A text, or a chat as the model reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = Field(default=None, min_length=1)
    tools: Items[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Items[int] = Field(max_length=MAX_TOKENS)


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN, Infinity and 1e999, and RecursionError."""

    def finite(name: str) -> float:
        if not math.isfinite(value := float(name)):
            raise ValueError(f"{name[:40]} is no finite number")
        return value

    return json.loads(text, parse_constant=finite, parse_float=finite)


Request = TypeVar("Request", bound=Strict)


def parse_request(kind: type[Request], body: Any) -> Request:
    """Validates a decoded JSON body. Raises ApiError naming the wrong parameter, the deepest if several are."""
    if not isinstance(body, dict):
        required = [f"'{name}'" for name, field in kind.model_fields.items() if field.is_required()]
        raise ApiError(f"The body must be a JSON object with {' and '.join(required) or 'the parameters'}.")
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error, kind, body) from None
    if isinstance(request, Generating) and request.stream_options is not None and not request.stream:
        raise _only("stream_options", "is only allowed when 'stream' is true")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise _only("top_logprobs", "is only allowed when 'logprobs' is true")
    if isinstance(request, CompletionRequest) and request.max_tokens == 0 and not request.echo:
        raise _only("max_tokens", "may be 0 only with 'echo'")
    form = request.response_format if isinstance(request, Generating) else None
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise _only("response_format.json_schema", "belongs to the type 'json_schema', which needs it")
    return request


def _only(param: str, why: str) -> ApiError:
    return ApiError(f"'{param}' {why}.", param=param, code="invalid_value")


def ignored_fields(request: Any, sent: Any, where: str = "") -> Iterator[str]:
    """The names of the fields of a body that its request does not have, such as fields of other programs' servers."""
    if isinstance(request, list):
        for at, part in enumerate(request):
            if isinstance(part, Strict):
                yield from ignored_fields(part, sent[at], f"{where}[{at}]")
    elif isinstance(request, Strict):
        known = {field.alias or name: name for name, field in type(request).model_fields.items()}
        paths = {name: f"{where}.{name}".removeprefix(".") for name in sent}
        yield from (path for name, path in paths.items() if name not in known)
        for name in filter(known.get, sent):
            yield from ignored_fields(getattr(request, known[name]), sent[name], paths[name])


def _refusal(error: ValidationError, kind: type[Strict], body: Any) -> ApiError:
    """The deepest error, which is in the branch of a union that was meant: pydantic lists errors of all branches."""
    errors = error.errors(include_url=False, include_context=False)[:MOST_ERRORS]
    literals = [one["loc"] for one in errors if one["type"] == "literal_error"]
    others = {loc[:-1] for loc in literals if loc[-1] == "type"}  # branches for another `type`
    paths = [_path(body, one["loc"]) + [*one["loc"][-1:]] * (one["type"] == "missing") for one in errors]
    # A list that is too long is told to be so, also where each of its items is wrong for another branch of a union.
    long = [one["type"] == "too_long" for one in errors]
    at = max(range(len(errors)), key=lambda at: (long[at], len(paths[at]), errors[at]["loc"][:-1] not in others))
    first = errors[at]
    param = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in paths[at]).removeprefix(".")
    if first["type"] == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    where = f"for '{param}'" if param else "in the body"
    # Inside messages and items, pydantic's message is specific enough.
    name = param if param.startswith(("messages", "input")) else re.split(r"[.\[]", param)[0]
    why = first["msg"].partition(" or instance of")[0]
    if name in kind.instead:
        told = first["type"] in ("string_pattern_mismatch", "string_too_long", "string_unicode", "too_long")
        why = f"{why}; {kind.instead[name]}" if told else kind.instead[name]
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        why = f"'{first['input'][:40]}' is not supported, {why.replace('Input should be', 'use')}"
    return ApiError(f"Invalid value {where}: {why}.", param=param or None, code="invalid_value")


def _path(body: Any, loc: tuple[int | str, ...]) -> list[int | str]:
    """The keys and indices of an error's place, without the names of a union's branches, which the body lacks."""
    path: list[int | str] = []
    for place in loc:
        if place in body if isinstance(body, dict) else isinstance(body, list) and isinstance(place, int):
            body = cast(Any, body)[place]
            path.append(place)
    return path
