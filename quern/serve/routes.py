"""The paths of the API: which request is read there, how it becomes a job of the engine, and what answers it."""

from __future__ import annotations

import asyncio
import codecs
import inspect
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from quern import __version__
from quern.generate.engine import Engine
from quern.generate.grammar import Grammar
from quern.generate.reply import Completion, Event, Generation, Token
from quern.serve.answers import JSON, UNKNOWN, Answer, Chat, EventStream, Text, as_api_error, error_response
from quern.serve.errors import ApiError, Strict, invalid
from quern.serve.forms import NamedTool, Tool, calls_of, form_of
from quern.serve.models import Models
from quern.serve.responses import Responses, ResponsesRequest
from quern.serve.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
    turns,
)
from quern.serve.worker import Worker
from quern.text.chat import render_prompt, render_text
from quern.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 1 << 20
MAX_MARKS = 1 << 13
"""JSON's marks in a body: objects, lists, fields and strings. The numbers of a list do not count. Decoding and
validating so many takes some 50 ms, in which no other client is served."""
SMALL_BYTES = 1 << 12
"""A body up to this size is decoded at once; a larger one between two steps of the engine."""
DEFAULT_TEXT_TOKENS = 16
"""Tokens of a completion whose request does not say, as in OpenAI's API."""
MOST_NAMES, NAME_CHARACTERS = 20, 80
"""The most ignored fields that the header names, and the most characters of each name."""
Body = TypeVar("Body", bound=Strict)


def routes(models: Models) -> list[Route]:
    """Every path but the page's."""
    posts: dict[str, tuple[type[Strict], Callable[..., Awaitable[Response]]]] = {
        "/v1/chat/completions": (ChatRequest, chat),
        "/v1/completions": (CompletionRequest, completions),
        "/v1/responses": (ResponsesRequest, responses),
        "/tokenize": (TokenizeRequest, tokenize),
        "/detokenize": (DetokenizeRequest, detokenize),
    }

    def post(kind: type[Strict], answer: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        async def route(http: Request) -> Response:
            body = await read_body(http)
            with models.find(None) as first:
                read = partial(decode, kind, body)
                found = await first.call(read) if len(body) > SMALL_BYTES else read()
            request: Any = found[0]
            with models.find(request.model) as model:
                response = await answer(http, request, model)
            if ignored := found[1]:
                more = [f"and {len(ignored) - MOST_NAMES} more"] if len(ignored) > MOST_NAMES else []
                names = [json.dumps(name[:NAME_CHARACTERS])[1:-1] for name in ignored[:MOST_NAMES]]
                response.headers["x-ignored-fields"] = ", ".join([*names, *more])
            return response

        return route

    async def health(_: Request) -> Response:
        """Says whether the engines run: 200, or 503 after one has stopped."""
        stopped = [model.name for model in models.all() if not model.alive]
        return JSON({"status": f"the engine of {stopped[0]} has stopped"}, 503) if stopped else JSON({"status": "ok"})

    async def metrics(_: Request) -> Response:
        """Has counters for Prometheus."""
        return Response(generate_latest(models.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def list_models(_: Request) -> Response:
        """Lists the models and the lengths of their contexts."""
        return JSON({"object": "list", "data": [model.body() for model in models.all()]})

    async def one_model(http: Request) -> Response:
        """Describes one model."""
        return JSON(models.find(http.path_params["model"]).body())

    async def published(_: Request) -> Response:
        """Describes the paths and the bodies of the POST requests."""
        names = [model.name for model in models.all()]
        return JSON(openapi(posts, gets, names))

    gets = {
        "/health": health,
        "/metrics": metrics,
        "/v1/models": list_models,
        "/v1/models/{model:path}": one_model,
        "/openapi.json": published,
    }
    return [Route(path, route, methods=["GET"]) for path, route in gets.items()] + [
        Route(path, post(*both), methods=["POST"]) for path, both in posts.items()
    ]


def openapi(
    posts: Mapping[str, tuple[type[Strict], Callable[..., Any]]],
    gets: Mapping[str, Callable[..., Any]],
    models: Sequence[str],
) -> dict[str, Any]:
    """The description of the paths in OpenAPI's format: what their functions' docstrings say, and the bodies."""
    shared: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    answered = {"200": {"description": "The answer."}}
    for path, (kind, function) in posts.items():
        own = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        own["properties"]["model"] |= {"enum": models}
        shared |= own.pop("$defs", {})
        del own["additionalProperties"]  # they are ignored
        body = {"required": True, "content": {"application/json": {"schema": own}}}
        paths[path] = {"post": {"summary": inspect.getdoc(function), "requestBody": body, "responses": answered}}
    if "ChatMessage" in shared:
        del shared["ChatMessage"]["additionalProperties"]
    for path, function in gets.items():
        name = re.sub(r":path(?=})", "", path)
        model = {"name": "model", "in": "path", "required": True, "schema": {"enum": models}}
        parameters = [model] if name != path else []
        paths[name] = {"get": {"summary": inspect.getdoc(function), "parameters": parameters, "responses": answered}}
    info = {"title": "quern", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": shared}}


async def chat(http: Request, request: ChatRequest, model: Worker) -> Response:
    """Answers a chat, whole or as a stream."""
    return await respond(http, await start_chat(model, request), request)


async def start_chat(model: Worker, request: ChatRequest) -> Chat:
    """Queues a chat. Raises ApiError if it cannot be served."""
    engine, samples = model.engine, request.n or 1
    prompt, options = await asyncio.to_thread(read_chat, engine, request)
    options["logprobs"] = (request.top_logprobs or 0) if request.logprobs else False
    job = model.submit(lambda: engine.submit([prompt], **options), samples)
    return Chat(job, model.tokenizer, model.name, [prompt], samples, bool(request.logprobs), "calls" in options)


def read_chat(engine: Engine, request: ChatRequest) -> tuple[list[int], dict[str, Any]]:
    """The prompt of a chat, and the arguments of `Engine.submit`."""
    tokenizer, choice = engine.tokenizer, request.tool_choice
    tools = [] if choice == "none" else request.tools or []
    prompt = _chat_tokens(tokenizer, request.messages, tools)
    _require_room(prompt, engine.context, "messages")
    # The engine also ends the reply at the end of the context.
    wanted = min(request.max_completion_tokens or request.max_tokens or engine.context, engine.context)
    options: dict[str, Any] = {"max_tokens": wanted, **_options(engine, request, prompt, wanted)}
    if choice == "none":
        options["bias"][tokenizer.special("<|tool_start|>")] = -math.inf
    if tools or choice not in (None, "auto", "none"):
        calls = calls_of(engine.grammars, tools, choice)
        must_call = choice == "required" or isinstance(choice, NamedTool)
        if must_call:
            _require_ending(calls, min(wanted, engine.context - len(prompt)) - 1, "tools")
        options |= {"calls": calls, "must_call": must_call}
    return prompt, options


async def completions(http: Request, request: CompletionRequest, model: Worker) -> Response:
    """Continues a text, a list of texts, or token ids."""
    engine, tokenizer, samples = model.engine, model.tokenizer, request.n or 1
    sent = request.prompts()
    prompts = await asyncio.to_thread(_text_tokens, tokenizer, sent)
    wanted = DEFAULT_TEXT_TOKENS if request.max_tokens is None else request.max_tokens
    for prompt in prompts:
        _require_room(prompt, engine.context + (wanted == 0), "prompt")
    options = await asyncio.to_thread(_options, engine, request, max(prompts, key=len), wanted)
    options |= {"max_tokens": min(wanted, engine.context), "plain": True}
    logprobs = False if request.logprobs is None else request.logprobs
    both = zip(prompts, sent, strict=True)
    echo = [await _echo(model, ids, logprobs, own != ids) for ids, own in both] if request.echo else None

    def begin() -> Generation:
        if wanted:
            return engine.submit(prompts, logprobs=logprobs, **options)
        done = Generation(0)
        for number, prompt in enumerate(prompts):
            for sample in range(samples):
                done.events.append(Event(number, sample, Completion([], "", "length", [], len(prompt))))
        return done

    job = model.submit(begin, len(prompts) * samples)
    answer = Text(job, tokenizer, model.name, prompts, samples, logprobs is not False, echo=echo)
    return await respond(http, answer, request)


async def _echo(model: Worker, prompt: Sequence[int], logprobs: bool | int, from_text: bool) -> tuple[str, list[Token]]:
    """The text of a prompt, without the BOS in front, and, if they are asked for, its tokens' log-probabilities, which
    are read in parts between two tokens of the replies that run."""
    tokenizer = model.tokenizer
    own = prompt[1:] if from_text else prompt
    scored: list[Token] = []
    if logprobs is not False:
        parts = model.engine.read(prompt, logprobs)
        while (part := await model.call(lambda: next(parts, None))) is not None:
            scored += part
    if not from_text and logprobs is not False:  # nothing stands before its first token
        scored.insert(0, Token(prompt[0], UNKNOWN, [], 0))
    text, decoder, placed = "", codecs.getincrementaldecoder("utf-8")("replace"), []
    for token in scored:
        placed.append(token._replace(start=len(text)))
        text += decoder.decode(tokenizer.decode_bytes([token.id]))
    return tokenizer.decode(own), placed


async def responses(http: Request, request: ResponsesRequest, model: Worker) -> Response:
    """Answers a chat in the shape of OpenAI's newer API. Nothing is stored."""
    try:
        answer = Responses(request, await start_chat(model, await model.call(request.chat)))
    except ApiError as error:
        raise error.renamed(request.name_of) from None
    return EventStream(answer.job, answer.stream()) if request.stream else await whole(http, answer)


async def tokenize(_: Request, request: TokenizeRequest, model: Worker) -> Response:
    """Returns the token ids of a text or of a chat."""
    tokens = await asyncio.to_thread(tokens_of, model.tokenizer, request)
    counted = {"count": len(tokens), "max_model_len": model.engine.context}
    return await model.call(lambda: JSON({**counted, "tokens": tokens}))


def tokens_of(tokenizer: Tokenizer, request: TokenizeRequest) -> list[int]:
    """The tokens of a text or of a chat. Raises ApiError unless exactly one of them is given."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("Send either 'prompt' or 'messages'.", param="prompt", code="invalid_value")
    if request.messages is not None:
        return _chat_tokens(tokenizer, request.messages, request.tools or [])
    text = request.prompt or ""
    return tokenizer.encode(text) if request.add_special_tokens is False else render_text(tokenizer, text)


async def detokenize(_: Request, request: DetokenizeRequest, model: Worker) -> Response:
    """Returns the text of token ids."""

    def read() -> Response:
        _require_tokens(model.tokenizer, request.tokens, "tokens")
        return JSON({"prompt": model.tokenizer.decode(request.tokens)})

    return await model.call(read)


def _require_tokens(tokenizer: Tokenizer, ids: Sequence[int], param: str) -> None:
    wrong = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        raise invalid(param, f"{wrong[0]} is no token; ids are 0 to {tokenizer.vocab_size - 1}")


def _options(
    engine: Engine, request: ChatRequest | CompletionRequest, longest: Sequence[int], wanted: int
) -> dict[str, Any]:
    """The arguments of `Engine.submit` for the longest prompt and replies of at most `wanted` tokens."""
    tokenizer = engine.tokenizer
    form = None
    if request.bound and wanted:
        form, param = form_of(engine.grammars, request.response_format, request.structured_outputs)
        _require_ending(form, min(wanted, engine.context - len(longest)), param)
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    _require_tokens(tokenizer, list(bias), "logit_bias")
    _require_tokens(tokenizer, request.stop_token_ids or [], "stop_token_ids")
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


def _chat_tokens(tokenizer: Tokenizer, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
    try:
        return render_prompt(tokenizer, turns(messages, tools))
    except (ValueError, RecursionError) as error:
        raise invalid("messages", error) from None


def _text_tokens(tokenizer: Tokenizer, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Token ids of each prompt. Ids are taken as they are; a text is the beginning of a document."""
    for prompt in prompts:
        if not isinstance(prompt, str):
            _require_tokens(tokenizer, prompt, "prompt")
    return [render_text(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _require_room(prompt: Sequence[int], context: int, param: str) -> None:
    if len(prompt) >= context:
        raise ApiError(
            f"This model's context holds {context} tokens; '{param}' already takes {len(prompt)}: shorten it.",
            param=param,
            code="context_length_exceeded",
            n_prompt_tokens=len(prompt),
            n_ctx=context,
        )


async def respond(http: Request, answer: Answer, request: ChatRequest | CompletionRequest) -> Response:
    """The stream, or the complete response."""
    if request.stream:
        return EventStream(answer.job, answer.stream(request.include_usage))
    return await whole(http, answer)


async def whole(http: Request, answer: Answer | Responses) -> Response:
    """The complete response. The job is cancelled if the client disconnects."""
    finished, gone = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            return Response(status_code=499)
        return Response(finished.result(), media_type=JSON.media_type)
    finally:
        finished.cancel()
        gone.cancel()
        answer.job.cancel()


async def disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def read_body(http: Request) -> bytes:
    """The body. Raises ApiError for a wrong media type, and for a body that is too large or has too many parts."""
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError("Send the body as JSON, with the header 'Content-Type: application/json'.", status=415)
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(f"The body is larger than {MAX_BODY_BYTES:,} bytes: shorten the messages.", status=413)
    except ClientDisconnect:  # no failure of the server, whose log would have a traceback; nobody reads the answer
        raise ApiError("The client left before the end of its body.", status=499) from None
    if marks(body) > MAX_MARKS:
        raise ApiError(f"The body has more than {MAX_MARKS:,} objects, lists, fields and strings: shorten it.")
    return bytes(body)


def decode(kind: type[Body], body: bytes) -> tuple[Body, list[str]]:
    """The request in a body, and the names of fields that are ignored. Raises ApiError if it is none."""
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("The body is not valid JSON.") from None
    ignored: list[str] = []
    return parse_request(kind, decoded, ignored), ignored


def marks(body: bytearray) -> int:
    """Counts JSON's marks outside of strings, and strings; of a text that is no JSON, some number."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = plain.count(b'"') // 2
    if strings > MAX_MARKS:
        return strings
    outside = b"".join(plain.split(b'"')[::2])
    return strings + sum(map(outside.count, (b"{", b"[", b":")))


async def on_error(http: Request, error: Exception) -> Response:
    """The response to every exception."""
    if not isinstance(error, HTTPException):
        return error_response(as_api_error(error))
    words = {404: "There is nothing at", 405: f"{http.method} is not allowed at"}
    status = error.status_code
    return error_response(ApiError(f"{words.get(status, 'Error at')} {http.url.path}.", status=status))


ON_ERROR: Any = dict.fromkeys((ApiError, HTTPException, Exception), on_error)
