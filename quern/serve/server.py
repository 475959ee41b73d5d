"""The HTTP server: an OpenAI-compatible chat API over one engine, and the page to chat on.

`create_app` builds the application, `serve` runs it, by default on loopback. Cross-origin requests fail: a body must
be declared as JSON, which browsers send across origins only with a permission that the server never gives, and a
request for another host name is refused. Requests are in schema.py, responses in answers.py, what leads from the one to
the other in generate.py, the generating thread in worker.py.
"""

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quern.generate.engine import Engine
from quern.serve import generate, schema
from quern.serve.answers import JSON, Answer, EventStream, as_api_error, error_response
from quern.serve.frontier import Frontier, Keys
from quern.serve.metrics import Metrics
from quern.serve.page import Welcome, add_page
from quern.serve.schema import ApiError, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from quern.serve.worker import Worker
from quern.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 1 << 20
DRAIN_SECONDS = 30
"""Replies that are being written when the server is asked to stop have so long to end."""
WARM_ROWS = (1, 8, 32)
"""The sizes of the running batch for which `quern serve` compiles; the last one is the most rows that run together."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    *,
    hosts: Sequence[str] | None = LOOPBACK,
    max_waiting: int = 256,
    keys: Keys | None = None,
    log: Callable[[str], None] | None = None,
    welcome: Welcome | None = None,
) -> FastAPI:
    """Builds the application. name: the model's name; hosts, keys, log: as in `Frontier`; welcome: the page's begin."""
    metrics = Metrics(engine, name)
    worker = Worker(engine, metrics, max_waiting)
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop)

    # The interactive documentation would load scripts from other hosts.
    app = FastAPI(title="quern", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Frontier, hosts=hosts, keys=keys, log=log)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_failure)

    @app.get("/health")
    async def health() -> Response:
        return JSON({"status": "ok"}) if worker.alive else JSON({"status": "the engine has stopped"}, 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSON({"object": "list", "data": [model_body(name, created, engine.context)]})

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        require_model(model, name)
        return JSON(model_body(name, created, engine.context))

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        request = schema.parse_request(ChatRequest, await read_json(http))
        require_model(request.model, name)
        return await respond(http, request, await generate.chat(worker, tokenizer, name, request))

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        request = schema.parse_request(CompletionRequest, await read_json(http))
        require_model(request.model, name)
        return await respond(http, request, await generate.texts(worker, tokenizer, name, request))

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        request = schema.parse_request(TokenizeRequest, await read_json(http))
        require_model(request.model or name, name)
        tokens = await asyncio.to_thread(generate.tokens_of, tokenizer, request)
        return JSON({"count": len(tokens), "max_model_len": engine.context, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = schema.parse_request(DetokenizeRequest, await read_json(http))
        require_model(request.model or name, name)
        generate.require_tokens(tokenizer, request.tokens, "tokens")
        return JSON({"prompt": tokenizer.decode(request.tokens)})

    add_page(app, welcome or Welcome())
    return app


def prepare_threads() -> None:
    """Lets the event loop interrupt the engine's thread sooner than Python's 5 ms: a step takes less."""
    sys.setswitchinterval(0.0005)


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    listener: socket.socket,
    host: str,
    keys: Keys | None = None,
    log: Callable[[str], None] | None = None,
    welcome: Welcome | None = None,
) -> None:
    """Serves on a socket of `listen` until interrupted. host: the host of `listen`; the others as in `create_app`."""
    hosts = LOOPBACK if host in LOOPBACK else None
    prepare_threads()
    app = create_app(engine, tokenizer, name, hosts=hosts, keys=keys, log=log, welcome=welcome)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_SECONDS)
    uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Raises ValueError or OSError naming the flag to change."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be 0 (any that is free) to 65535, not {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise OSError(f"cannot serve at {host}:{port} ({reason}): choose another --port or --host") from error


def require_model(asked: str, name: str) -> None:
    if asked != name:
        raise ApiError(
            f"The model '{asked}' does not exist; this server has '{name}'.",
            status=404,
            param="model",
            code="model_not_found",
        )


async def read_json(http: Request) -> Any:
    """Decodes the body. Raises ApiError for a wrong media type, a body that is too large, or invalid JSON."""
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError("Send the body as JSON, with the header 'Content-Type: application/json'.", status=415)
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"The body is larger than {MAX_BODY_BYTES:,} bytes: shorten the messages.", status=413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("The body is not valid JSON.") from None


async def respond(http: Request, request: ChatRequest | CompletionRequest, answer: Answer) -> Response:
    """The stream, or the complete response. The job is cancelled if the client disconnects."""
    if request.stream:
        return EventStream(answer.job, answer.stream(request.include_usage))
    finished = asyncio.ensure_future(answer.whole())
    gone = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        return JSON(finished.result()) if finished.done() else Response(status_code=499)
    finally:
        answer.job.cancel()
        finished.cancel()
        gone.cancel()


async def disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def model_body(name: str, created: int, context: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "quern", "max_model_len": context}


async def on_api_error(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))


async def on_http_error(http: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: "There is nothing at", 405: f"{http.method} is not allowed at"}
    return error_response(ApiError(f"{words.get(status, 'Error at')} {http.url.path}.", status=status))


async def on_failure(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))
