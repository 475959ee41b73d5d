"""A request's fields become the arguments of `Engine.submit`: the prompt's tokens, the form of the reply, its options.

The caller's tools are described to the model in the system message; a call is one JSON object between the model's own
tool tokens, and its form is enforced.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quern.generate.engine import Engine
from quern.generate.grammar import CostlyError, Grammar, Grammars
from quern.serve.schema import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    NamedTool,
    TokenizeRequest,
    Tool,
    ToolChoice,
    invalid,
    read_json,
)
from quern.text.chat import Message, parts, render_prompt, render_text
from quern.text.conversations import to_messages
from quern.text.tokenizer import Tokenizer

DEFAULT_TEXT_TOKENS = 16
"""Tokens of a completion whose request does not say, as in OpenAI's API."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_ARGUMENTS = ANY_OBJECT | {"properties": {}, "additionalProperties": False}


def read_chat(engine: Engine, request: ChatRequest) -> tuple[list[int], dict[str, Any]]:
    """The prompt of a chat, and the arguments of `Engine.submit`. Raises ApiError if it cannot be served."""
    tokenizer, choice = engine.tokenizer, request.tool_choice
    tools = [] if choice == "none" else request.tools or []
    prompt = _chat_tokens(tokenizer, request.messages, tools)
    _require_room(prompt, engine.context, "messages")
    # The engine also ends the reply at the end of the context.
    wanted = min(request.max_completion_tokens or request.max_tokens or engine.context, engine.context)
    options = {"max_tokens": wanted, **_options(engine, request, prompt, wanted)}
    options["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    if choice == "none":
        options["bias"][tokenizer.special("<|tool_start|>")] = -math.inf
    if tools or choice not in (None, "auto", "none"):
        calls = calls_of(engine.grammars, tools, choice)
        must_call = choice == "required" or isinstance(choice, NamedTool)
        if must_call:
            _require_ending(calls, min(wanted, engine.context - len(prompt)) - 1, "tools")
        options |= {"calls": calls, "must_call": must_call}
    return prompt, options


def read_texts(engine: Engine, request: CompletionRequest) -> tuple[list[list[int]], dict[str, Any]]:
    """The prompts of a completion, and the arguments of `Engine.submit`; max_tokens may be 0, for `echo` alone."""
    tokenizer, sent = engine.tokenizer, request.prompts()
    wanted = DEFAULT_TEXT_TOKENS if request.max_tokens is None else request.max_tokens
    for prompt in sent:
        require_tokens(tokenizer, [] if isinstance(prompt, str) else prompt, "prompt")
    # Ids are taken as they are; a text is the beginning of a document.
    with _refused_as("prompt"):
        prompts = [render_text(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in sent]
        for prompt in prompts:
            _require_room(prompt, engine.context, "prompt", min(wanted, 1))
            engine.refuse(prompt)
    options = _options(engine, request, max(prompts, key=len), wanted)
    if request.seed is None:  # equal texts of one request are continued in different ways
        options["seed"] = [secrets.randbits(63) for _ in prompts]
    return prompts, options | {"max_tokens": min(wanted, engine.context), "plain": True, "logprobs": request.logprobs}


def tokens_of(tokenizer: Tokenizer, request: TokenizeRequest) -> list[int]:
    """The tokens of a text or of a chat. Raises ApiError unless exactly one of them is given."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("Send either 'prompt' or 'messages'.", param="prompt", code="invalid_value")
    if request.messages is not None:
        return _chat_tokens(tokenizer, request.messages, request.tools or [])
    with _refused_as("prompt"):
        tokens = render_text(tokenizer, request.prompt or "")
    return tokens[1:] if request.add_special_tokens is False else tokens


@contextmanager
def _refused_as(param: str) -> Iterator[None]:
    """Raises ApiError about this field where the body refuses its value."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise invalid(param, error) from None


def require_tokens(tokenizer: Tokenizer, ids: Sequence[int], param: str) -> None:
    """Raises ApiError for an id that no token has."""
    wrong = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        raise invalid(param, f"{wrong[0]} is no token; ids are 0 to {tokenizer.vocab_size - 1}")


def _options(
    engine: Engine, request: ChatRequest | CompletionRequest, longest: Sequence[int], wanted: int
) -> dict[str, Any]:
    """The arguments of `Engine.submit` for the longest prompt and replies of at most `wanted` tokens."""
    form, param = form_of(engine.grammars, request) if wanted else (None, "")
    if form is not None:
        _require_ending(form, min(wanted, engine.context - len(longest)), param)
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    require_tokens(engine.tokenizer, list(bias), "logit_bias")
    require_tokens(engine.tokenizer, request.stop_token_ids or [], "stop_token_ids")
    return {
        "samples": request.n or 1,
        "sampling": request.sampling,
        "seed": secrets.randbits(63) if request.seed is None else request.seed,
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop or [],
        "stop_ids": request.stop_token_ids or [],
        "bias": bias,
        "form": form,
    }


def _require_ending(form: Grammar, room: int, param: str) -> None:
    if form.shortest(room) is None:
        raise invalid(param, f"no such text that ends within {room} tokens was found: allow more, or demand less")


def _require_room(prompt: Sequence[int], context: int, param: str, wanted: int = 1) -> None:
    if len(prompt) + wanted > context:
        raise ApiError(
            f"This model's context holds {context} tokens; '{param}' already takes {len(prompt)}: shorten it.",
            param=param,
            code="context_length_exceeded",
            n_prompt_tokens=len(prompt),
            n_ctx=context,
        )


# The form of a reply -----------------------------------------------------------------------------------------


def form_of(grammars: Grammars, request: ChatRequest | CompletionRequest) -> tuple[Grammar | None, str]:
    """The form of the reply's text, None for any, and the field that demands it.

    Raises ApiError for a form that cannot be followed.
    """
    asked, structured = request.response_format, request.structured_outputs
    if asked is not None and asked.type == "text":
        asked = None
    if structured is not None:
        given = {name.rstrip("_"): value for name, value in structured if value is not None}
        if len(given) != 1 or asked is not None:
            raise invalid("structured_outputs", "give exactly one of json, regex and choice, and no response_format")
        [(name, value)] = given.items()
        param = f"structured_outputs.{name}"
    elif asked is None:
        return None, ""
    else:
        own, name = asked.json_schema, "json"
        value, param = (own.schema_, "response_format.json_schema.schema") if own else (ANY_OBJECT, "response_format")
    with _refused_as(param):
        return getattr(grammars, name)(value), param


def calls_of(grammars: Grammars, tools: Sequence[Tool], choice: ToolChoice | None) -> Grammar:
    """The form of a call. Raises ApiError for a wrong schema or an unknown name."""
    if not tools:
        raise invalid("tool_choice", "there are no tools: send them in 'tools'")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", f"two of them are called '{max(names, key=names.count)}'")
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    if wanted is not None and wanted not in names:
        raise invalid("tool_choice", f"'{wanted}' is none of the tools: {', '.join(names)}")
    chosen = [tool.function for tool in tools if wanted in (None, tool.function.name)]
    schemas = {function.name: function.parameters or NO_ARGUMENTS for function in chosen}
    try:
        return grammars.calls(schemas)
    except (ValueError, RecursionError) as error:
        for name, schema in () if isinstance(error, CostlyError) else schemas.items():
            with _refused_as(f"tools[{names.index(name)}].function.parameters"):
                grammars.json(schema)
        raise invalid("tools", error) from None


# The messages of a chat --------------------------------------------------------------------------------------


def _chat_tokens(tokenizer: Tokenizer, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
    with _refused_as("messages"):
        try:
            return render_prompt(tokenizer, turns(messages, tools))
        except RecursionError:
            raise invalid("tools" if tools else "messages", "nested too deep") from None


def turns(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[Message]:
    """The conversation in the chat format, by the conversion of fine-tuning: a model reads what it was trained on.

    Any order of roles becomes one that is trained. A chat that ends with the assistant's text or a tool's output is
    continued in the same turn. Raises ApiError for a message that lacks what its role needs, ValueError for others.
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
    """A system message, then the user and the assistant in turn, as models are trained.

    Every system message joins the first one, and a message joins the one before it of the same role, each as a
    paragraph. An empty message of the user begins a chat in which the user says nothing first.
    """
    system: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        own, text = message["parts"] or [], message["content"] or ""
        if isinstance(text, list):
            text = "".join(one if isinstance(one, str) else one["text"] for one in text)
        if own and text and all(part["type"] != "text" for part in own):  # a stream tells the text apart from them
            own = [*own, {"type": "text", "text": text}]
        message["content"] = own or text
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
    return [*parts({"content": one}), {"type": "text", "text": "\n\n"}, *parts({"content": other})]


def _calls(message: ChatMessage, where: str) -> set[str]:
    """The ids of a message's calls."""
    ids: set[str] = set()
    for number, call in enumerate(message.tool_calls or []):
        param = f"{where}.tool_calls[{number}]"
        if call.id in ids:
            raise invalid(f"{param}.id", "another call has it too")
        try:
            read_json(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            raise invalid(f"{param}.function.arguments", "it is not JSON") from None
        ids.add(call.id)
    return ids
