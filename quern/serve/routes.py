"""The paths of the API: which request is read there, and what answers it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from quern import __version__
from quern.serve import generate
from quern.serve.answers import JSON, Answer, EventStream, as_api_error, error_response
from quern.serve.models import Model, Models
from quern.serve.requests.errors import ApiError, Strict
from quern.serve.requests.responses import ResponsesRequest
from quern.serve.requests.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)
from quern.serve.responses import Responses

MAX_BODY_BYTES = 1 << 20
MAX_MARKS = 1 << 13
"""JSON's marks in a body: objects, lists, fields and strings. The numbers of a list do not count. Decoding and
validating so many takes some 50 ms, in which no other client is served."""
SMALL_BYTES = 1 << 12
"""A body up to this size is decoded at once; a larger one between two steps of the engine."""
Body = TypeVar("Body", bound=Strict)
Result = TypeVar("Result")


def add_routes(app: FastAPI, models: Models) -> None:
    """Adds every path but the page's."""
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_failure)

    shared: dict[str, Any] = {}  # parts of the bodies, which `parse_request` reads, for /openapi.json

    def post(path: str, kind: type[Body], answer: Callable[[Request, Body, Model], Awaitable[Response]]) -> None:
        async def route(http: Request) -> Response:
            body = await read_body(http)
            with models.find(None) as first:
                read = partial(decode, kind, body)
                request = await first.worker.call(read) if len(body) > SMALL_BYTES else read()
            with models.find(getattr(request, "model", None)) as model:
                return await answer(http, request, model)

        own = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        own["properties"]["model"] |= {"enum": [model.name for model in models.all()]}
        shared.update(own.pop("$defs", {}))
        body = {"required": True, "content": {"application/json": {"schema": own}}}
        app.add_api_route(path, route, methods=["POST"], response_class=Response, openapi_extra={"requestBody": body})

    post("/v1/chat/completions", ChatRequest, chat)
    post("/v1/completions", CompletionRequest, completions)
    post("/v1/responses", ResponsesRequest, responses)
    post("/tokenize", TokenizeRequest, tokenize)
    post("/detokenize", DetokenizeRequest, detokenize)

    def published() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=__version__, routes=app.routes)
            app.openapi_schema.setdefault("components", {}).setdefault("schemas", {}).update(shared)
        return app.openapi_schema

    app.openapi = published

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        stopped = [model.name for model in models.all() if not model.worker.alive]
        return JSON({"status": f"the engine of {stopped[0]} has stopped"}, 503) if stopped else JSON({"status": "ok"})

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        return Response(models.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", response_class=Response)
    async def list_models() -> Response:
        return JSON({"object": "list", "data": [model.body() for model in models.all()]})

    @app.get("/v1/models/{model:path}", response_class=Response)
    async def one_model(model: str) -> Response:
        return JSON(models.find(model).body())


async def chat(http: Request, request: ChatRequest, model: Model) -> Response:
    return await respond(http, await generate.chat(model, request), request)


async def completions(http: Request, request: CompletionRequest, model: Model) -> Response:
    return await respond(http, await generate.texts(model, request), request)


async def responses(http: Request, request: ResponsesRequest, model: Model) -> Response:
    try:
        answer = Responses(request, await generate.chat(model, await model.worker.call(request.chat)))
    except ApiError as error:
        raise error.renamed(request.name_of) from None
    return EventStream(answer.job, answer.stream()) if request.stream else await whole(http, answer)


async def tokenize(_: Request, request: TokenizeRequest, model: Model) -> Response:
    tokens = await asyncio.to_thread(generate.tokens_of, model.tokenizer, request)
    counted = {"count": len(tokens), "max_model_len": model.engine.context}
    return await model.worker.call(lambda: JSON({**counted, "tokens": tokens}))


async def detokenize(_: Request, request: DetokenizeRequest, model: Model) -> Response:
    def read() -> Response:
        generate.require_tokens(model.tokenizer, request.tokens, "tokens")
        return JSON({"prompt": model.tokenizer.decode(request.tokens)})

    return await model.worker.call(read)


async def respond(http: Request, answer: Answer, request: ChatRequest | CompletionRequest) -> Response:
    """The stream, or the complete response."""
    if request.stream:
        return EventStream(answer.job, answer.stream(request.include_usage))
    return await whole(http, answer)


async def whole(http: Request, answer: Answer | Responses) -> Response:
    """The complete response. The job is cancelled if the client disconnects."""
    try:
        body = await unless_gone(http, answer.whole())
    finally:
        answer.job.cancel()
    return Response(status_code=499) if body is None else Response(body, media_type=JSON.media_type)


async def unless_gone(http: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None if the client disconnects before, which cancels it."""
    finished = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        return finished.result() if finished.done() else None
    finally:
        finished.cancel()
        gone.cancel()


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


def decode(kind: type[Body], body: bytes) -> Body:
    """The request in a body. Raises ApiError if it is none."""
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("The body is not valid JSON.") from None
    return parse_request(kind, decoded)


def marks(body: bytearray) -> int:
    """Counts JSON's marks outside of strings, and strings; of a text that is no JSON, some number."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = plain.count(b'"') // 2
    if strings > MAX_MARKS:
        return strings
    outside = b"".join(plain.split(b'"')[::2])
    return strings + sum(map(outside.count, (b"{", b"[", b":")))


async def on_api_error(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))


async def on_http_error(http: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: "There is nothing at", 405: f"{http.method} is not allowed at"}
    return error_response(ApiError(f"{words.get(status, 'Error at')} {http.url.path}.", status=status))


async def on_failure(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))
