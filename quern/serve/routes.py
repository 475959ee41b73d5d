"""The paths of the server: which request is read there, and what answers it; the files of the chat page in web/.

The table of the files' paths is built with the application, so a request never names a file on disk.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from quern import __version__
from quern.generate.engine import Engine
from quern.generate.reply import Completion, Event, Generation, Token
from quern.generate.sampling import CHAT
from quern.records import read_lines
from quern.serve.answers import JSON, Answer, Chat, EventStream, Text, error_response
from quern.serve.prompts import read_chat, read_texts, require_tokens, tokens_of
from quern.serve.responses import Responses, ResponsesRequest
from quern.serve.schema import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Strict,
    TokenizeRequest,
    as_api_error,
    ignored_fields,
    parse_request,
    read_json,
)
from quern.serve.worker import Models, Worker

MAX_BODY_BYTES = 1 << 20
MAX_MARKS = 1 << 13
"""JSON's marks in a body: objects, lists, fields and strings. The numbers of a list do not count. Decoding and
validating so many takes some 50 ms, in which no other client is served."""
SMALL_BYTES = 1 << 12
"""A body up to this size is decoded at once; a larger one between two steps of the engine."""
LONG_BYTES = 1 << 16
"""The texts of a larger body are encoded in a thread of their own: a word of a megabyte takes a second."""
TOO_LARGE = "request_too_large"
MOST_NAMES, NAME_CHARACTERS = 20, 80
"""The most ignored fields that the header names, and the most characters of each name."""
WEB = Path(__file__).parent / "web"
SCRIPT = "text/javascript"
MEDIA_TYPES = {".html": "text/html", ".js": SCRIPT, ".mjs": SCRIPT, ".css": "text/css", ".svg": "image/svg+xml"}
"""Starlette adds the charset to those of texts."""
MOST_SUGGESTIONS = 6
MOST_SUGGESTION_CHARACTERS = 160


@dataclass(frozen=True)
class Welcome:
    """The beginning of the page. suggestions: by model; completes: the models that were never taught to chat."""

    suggestions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    completes: Sequence[str] = ()


class Sample(TypedDict, total=False):
    """The fields of a line of samples.jsonl that the server reads."""

    stage: str
    prompt: str
    messages: list[dict[str, Any]]


def read_suggestions(run: Path, stage: str) -> tuple[str, ...]:
    """The first turns of the run's own samples of a stage, which `quern evaluate` keeps; none without them."""
    asked = dict[str, None]()
    for sample in read_lines(run / "samples.jsonl", Sample):
        text = (sample.get("messages") or [{"content": sample.get("prompt")}])[0].get("content")
        text = text.strip() if isinstance(text, str) and sample.get("stage") == stage else ""
        if text and len(text) <= MOST_SUGGESTION_CHARACTERS and "\n" not in text:
            asked[text] = None
    found, count = list(asked), min(MOST_SUGGESTIONS, len(asked))  # evenly spread: neighbours are of one kind
    return tuple(found[number * len(found) // count] for number in range(count))


def page_paths() -> dict[str, Path]:
    """The files of the page by the paths of their URLs."""
    files = [file for file in sorted(WEB.rglob("*")) if file.suffix in MEDIA_TYPES]
    named = {"index.html": "/", "docs.html": "/docs"}
    return {named.get(file.name, f"/{file.relative_to(WEB).as_posix()}"): file for file in files}


def routes(models: Models) -> list[Route]:
    """Every path: paths of the API, and one for each file of the page. The application's state has the `Welcome`."""
    posts: dict[str, tuple[type[Strict], Callable[..., Awaitable[Response]]]] = {
        "/v1/chat/completions": (ChatRequest, chat),
        "/v1/completions": (CompletionRequest, completions),
        "/v1/responses": (ResponsesRequest, responses),
        "/tokenize": (TokenizeRequest, tokenize),
        "/detokenize": (DetokenizeRequest, detokenize),
    }

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

    async def begin(http: Request) -> Response:
        welcome: Welcome = http.app.state.welcome
        sampling = {"temperature": CHAT.temperature, "top_k": CHAT.top_k}
        return JSON({"suggestions": welcome.suggestions, "completes": welcome.completes, "sampling": sampling})

    gets = {
        "/health": health,
        "/metrics": metrics,
        "/v1/models": list_models,
        "/v1/models/{model:path}": one_model,
        "/openapi.json": published,
    }
    page = {
        path: Response(file.read_bytes(), headers={"cache-control": "no-cache"}, media_type=MEDIA_TYPES[file.suffix])
        for path, file in page_paths().items()
    }
    return [Route(path, route, methods=["GET"]) for path, route in {**gets, "/welcome": begin, **page}.items()] + [
        Route(path, _post(models, *both), methods=["POST"]) for path, both in posts.items()
    ]


def _post(
    models: Models, kind: type[Strict], answer: Callable[..., Awaitable[Response]]
) -> Callable[..., Awaitable[Response]]:
    """Makes the handler of a path that takes a JSON body. answer: (HTTP request, body, model) → its response."""

    async def route(http: Request) -> Response:
        body = await read_body(http)
        with models.find(None) as first:
            read = partial(decode, kind, body)
            request, ignored = await first.call(read) if len(body) > SMALL_BYTES else read()
        http.state.long = len(body) > LONG_BYTES
        with models.find(request.model) as model:
            response = await answer(http, request, model)
        if ignored:
            more = [f"and {len(ignored) - MOST_NAMES} more"] if len(ignored) > MOST_NAMES else []
            names = [json.dumps(name[:NAME_CHARACTERS])[1:-1] for name in ignored[:MOST_NAMES]]
            response.headers["x-ignored-fields"] = ", ".join([*names, *more])
        return response

    return route


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
        body = {"required": True, "content": {"application/json": {"schema": own}}}
        paths[path] = {"post": {"summary": inspect.getdoc(function), "requestBody": body, "responses": answered}}
    for path, function in gets.items():
        name = re.sub(r":path(?=})", "", path)
        model = {"name": "model", "in": "path", "required": True, "schema": {"enum": models}}
        parameters = [model] if name != path else []
        paths[name] = {"get": {"summary": inspect.getdoc(function), "parameters": parameters, "responses": answered}}
    info = {"title": "quern", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": shared}}


async def chat(http: Request, request: ChatRequest, model: Worker) -> Response:
    """Answers a chat, whole or as a stream."""
    answer = await start_chat(http, model, request)
    return await respond(http, answer, answer.stream(request.include_usage) if request.stream else None)


async def start_chat(http: Request, model: Worker, request: ChatRequest) -> Chat:
    """Queues a chat. Raises ApiError if it cannot be served."""
    prompt, options = await read_aside(read_chat, http, model, request)
    job = model.submit(lambda: model.engine.submit([prompt], **options), options["samples"])
    return Chat(job, [prompt], options["samples"], bool(request.logprobs), calls="calls" in options)


async def read_aside(read: Callable[[Engine, Any], Any], http: Request, model: Worker, request: Any) -> Any:
    """Reads a request in a thread. Those that may take long share one thread, so that no other request waits for them:
    requests with a form, and with long texts."""
    formed = any(getattr(request, name, None) for name in ("response_format", "structured_outputs", "tools"))
    threads = model.slow if formed or http.state.long else None
    return await asyncio.get_running_loop().run_in_executor(threads, read, model.engine, request)


async def completions(http: Request, request: CompletionRequest, model: Worker) -> Response:
    """Continues a text, a list of texts, or token ids."""
    prompts, options = await read_aside(read_texts, http, model, request)
    samples, logprobs = options["samples"], options["logprobs"]
    both = zip(prompts, request.prompts(), strict=True)
    echo = [await _echo(model, ids, logprobs, own != ids) for ids, own in both] if request.echo else None

    def begin() -> Generation:
        if options["max_tokens"]:
            return model.engine.submit(prompts, **options)
        done = Generation(0)
        for number, prompt in enumerate(prompts):
            for sample in range(samples):
                done.events.append(Event(number, sample, Completion([], "", "length", [], len(prompt))))
        return done

    job = model.submit(begin, len(prompts) * samples)
    answer = Text(job, prompts, samples, logprobs is not None, fronts=echo)
    return await respond(http, answer, answer.stream(request.include_usage) if request.stream else None)


async def _echo(model: Worker, prompt: Sequence[int], logprobs: int | None, from_text: bool) -> tuple[str, list[Token]]:
    """The text of a prompt, without the BOS that the server puts in front of a text, and, if they are asked for, its
    tokens' log-probabilities, which are read in parts between two tokens of the replies that run."""
    tokenizer = model.tokenizer
    own = prompt[1:] if from_text else prompt
    scored: list[Token] = []
    if logprobs is not None:
        parts = model.engine.read(prompt, logprobs)
        while (part := await model.call(lambda: next(parts, None))) is not None:
            scored += part
    if not from_text and logprobs is not None:  # nothing stands before its first token
        scored.insert(0, Token(prompt[0], None, [], 0))
    text, decoder, placed = "", codecs.getincrementaldecoder("utf-8")("replace"), []
    for token in scored:
        placed.append(token._replace(start=len(text)))
        text += decoder.decode(tokenizer.decode_bytes([token.id]))
    return tokenizer.decode(own), placed


async def responses(http: Request, request: ResponsesRequest, model: Worker) -> Response:
    """Answers a chat in the shape of OpenAI's newer API. Nothing is stored."""
    try:
        answer = Responses(request, await start_chat(http, model, await model.call(request.chat)))
    except ApiError as error:
        raise error.renamed(request.name_of) from None
    return await respond(http, answer, answer.stream() if request.stream else None)


async def tokenize(http: Request, request: TokenizeRequest, model: Worker) -> Response:
    """Returns the token ids of a text or of a chat."""
    tokens = await read_aside(lambda engine, body: tokens_of(engine.tokenizer, body), http, model, request)
    counted = {"count": len(tokens), "max_model_len": model.engine.context}
    return await model.call(lambda: JSON({**counted, "tokens": tokens}))


async def detokenize(_: Request, request: DetokenizeRequest, model: Worker) -> Response:
    """Returns the text of token ids."""

    def read() -> Response:
        require_tokens(model.tokenizer, request.tokens, "tokens")
        return JSON({"prompt": model.tokenizer.decode(request.tokens)})

    return await model.call(read)


async def respond(http: Request, answer: Answer | Responses, stream: AsyncIterator[str] | None) -> Response:
    """The stream, if one is wanted, or the complete response. The job is cancelled if the client disconnects."""
    if stream is not None:
        return EventStream(answer.job, stream)
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
    if media_type != "application/json" or http.headers.get("content-encoding", "").lower() not in ("", "identity"):
        how = "with the header 'Content-Type: application/json', not compressed"
        raise ApiError(f"Send the body as JSON, {how}.", status=415)
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                message = f"The body is larger than {MAX_BODY_BYTES:,} bytes: shorten the messages."
                raise ApiError(message, status=413, code=TOO_LARGE)
    except ClientDisconnect:  # no failure of the server, whose log would have a traceback; nobody reads the answer
        raise ApiError("The client left before the end of its body.", status=499) from None
    if marks(body) > MAX_MARKS:
        message = f"The body has more than {MAX_MARKS:,} objects, lists, fields and strings: shorten it."
        raise ApiError(message, code=TOO_LARGE)
    return bytes(body)


def decode(kind: type[Strict], body: bytes) -> tuple[Any, list[str]]:
    """The request in a body, and the names of fields that are ignored. Raises ApiError if it is none."""
    try:
        decoded = read_json(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body is not valid JSON: {error}.") from None
    request = parse_request(kind, decoded)
    return request, list(ignored_fields(request, decoded))


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
    status, path = error.status_code, http.url.path
    words = {404: f"There is nothing at {path}: /docs has the paths.", 405: f"{http.method} is not allowed at {path}."}
    response = error_response(ApiError(words.get(status, f"Error at {path}."), status=status))
    response.headers.update(error.headers or {})  # what a path allows
    return response


ON_ERROR: Any = dict.fromkeys((ApiError, HTTPException, Exception), on_error)
