"""The HTTP server: an OpenAI-compatible chat API over one engine, and the page to chat on.

`create_app` builds the application, `serve` runs it, by default on loopback. Cross-origin requests fail: a body must
be declared as JSON, which browsers send across origins only with a permission that the server never gives, and a
request for another host name is refused. The wire format is in schema.py, the generating thread in worker.py.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quern.generate.engine import Engine
from quern.generate.reply import Completion
from quern.serve import schema
from quern.serve.schema import ApiError, ChatRequest
from quern.serve.worker import Busy, Job, Stopped, Worker
from quern.text.chat import render_prompt
from quern.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 1 << 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
WEB = Path(__file__).parent / "web"
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class JSON(Response):
    """A response in ASCII, which can carry any text of a client, including unpaired surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


class EventStream(StreamingResponse):
    """Server-sent events of a job. The job ends with the response, even if no byte was sent."""

    def __init__(self, job: Job, content: AsyncIterator[str]):
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


class Frontier:
    """Middleware: refuses foreign host names, adds the security headers and a request id."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None):
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update({**SECURITY_HEADERS, "x-request-id": f"req_{uuid.uuid4().hex}"})
            await send(message)

        host = Headers(scope=scope).get("host", "")
        if self._hosts is not None and host_name(host) not in self._hosts:
            error = ApiError(f"This server does not answer for the host {host!r}.", status=403, code="foreign_host")
            return await error_response(error)(scope, receive, send_with_headers)
        await self._app(scope, receive, send_with_headers)


def host_name(host: str) -> str:
    """The host name in a Host header, in lower case, without port and brackets."""
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    *,
    hosts: Sequence[str] | None = LOOPBACK,
    max_waiting: int = 64,
) -> FastAPI:
    """Builds the application. name: the model's name; hosts: the accepted host names (None: any)."""
    worker = Worker(max_waiting)
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
    app.add_middleware(Frontier, hosts=hosts)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_failure)

    @app.get("/health")
    async def health() -> Response:
        return JSON({"status": "ok"}) if worker.alive else JSON({"status": "the engine has stopped"}, 503)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSON({"object": "list", "data": [schema.model_body(name, created)]})

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        require_model(model, name)
        return JSON(schema.model_body(name, created))

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        request = schema.parse_request(await read_json(http))
        require_model(request.model, name)
        job = await submit(worker, engine, tokenizer, request)
        identifier = f"chatcmpl-{uuid.uuid4().hex}"
        if request.stream:
            return EventStream(job, stream(job, request, identifier, name))
        return await answer_or_disconnect(http, job, identifier, name)

    for path, (file, media_type) in PAGE.items():
        content = (WEB / file).read_bytes()

        async def page(content: bytes = content, media_type: str = media_type) -> Response:
            return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

        app.add_api_route(path, page, methods=["GET"])
    return app


def serve(engine: Engine, tokenizer: Tokenizer, name: str, listener: socket.socket, host: str) -> None:
    """Serves on a socket of `listen` until interrupted. host: the host of `listen`."""
    app = create_app(engine, tokenizer, name, hosts=LOOPBACK if host in LOOPBACK else None)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=10)
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


async def submit(worker: Worker, engine: Engine, tokenizer: Tokenizer, request: ChatRequest) -> Job:
    """Queues the request. Raises ApiError if it cannot be served."""
    try:
        messages = [message.message() for message in request.messages]
        prompt = await asyncio.to_thread(render_prompt, tokenizer, messages)
    except ValueError as error:
        raise ApiError(f"Invalid value for 'messages': {error}.", param="messages", code="invalid_value") from None
    if len(prompt) >= engine.context:
        raise ApiError(
            f"This model's context holds {engine.context} tokens; the messages already take {len(prompt)}. "
            "Please shorten the messages.",
            param="messages",
            code="context_length_exceeded",
            extra={"n_prompt_tokens": len(prompt), "n_ctx": engine.context},
        )
    seed = secrets.randbits(63) if request.seed is None else request.seed
    try:
        return worker.submit(
            lambda: engine.events(
                [prompt],
                samples=request.n or 1,
                max_tokens=request.limit(engine.context),
                sampling=request.sampling,
                seed=seed,
                stop=request.stops(),
            )
        )
    except (Busy, Stopped) as error:
        raise as_api_error(error) from None


async def answer_or_disconnect(http: Request, job: Job, identifier: str, name: str) -> Response:
    """The complete response. The job is cancelled if the client disconnects."""
    finished = asyncio.ensure_future(answer(job, identifier, name))
    gone = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        return JSON(finished.result()) if finished.done() else Response(status_code=499)
    finally:
        job.cancel()
        finished.cancel()
        gone.cancel()


async def disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def answer(job: Job, identifier: str, name: str) -> dict[str, Any]:
    replies: dict[int, Completion] = {}
    try:
        async for event in job:
            if isinstance(event.value, Completion):
                replies[event.sample] = event.value
    except Exception as error:
        raise as_api_error(error) from error
    choices = [
        schema.choice(index, reply.finish_reason, message=schema.assistant_message(reply.text, reply.parts))
        for index, reply in sorted(replies.items())
    ]
    used = schema.usage(list(replies.values()))
    return schema.completion_body("chat.completion", identifier, int(time.time()), name, choices, usage=used)


async def stream(job: Job, request: ChatRequest, identifier: str, name: str) -> AsyncIterator[str]:
    """The events of a stream; it always ends with [DONE], after an error event if the job failed."""
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    created = int(time.time())

    def chunk(*choices: dict[str, Any], usage: dict[str, int] | None = None) -> str:
        more = {"usage": usage} if include_usage else {}
        body = schema.completion_body("chat.completion.chunk", identifier, created, name, list(choices), **more)
        return server_sent(body)

    replies: list[Completion] = []
    try:
        for index in range(request.n or 1):
            yield chunk(schema.choice(index, delta={"role": "assistant", "content": ""}))
        async for event in job:
            if isinstance(event.value, Completion):
                replies.append(event.value)
                yield chunk(schema.choice(event.sample, event.value.finish_reason, delta={}))
            elif event.value.kind == "text":
                yield chunk(schema.choice(event.sample, delta={"content": event.value.text}))
            else:
                part = {"type": event.value.kind, "text": event.value.text}
                yield chunk(schema.choice(event.sample, delta={"parts": [part]}))
        if include_usage:
            yield chunk(usage=schema.usage(replies))
    except Exception as error:
        yield server_sent(as_api_error(error).body)
    yield "data: [DONE]\n\n"


def server_sent(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, allow_nan=False)}\n\n"


def as_api_error(error: BaseException) -> ApiError:
    """The error for the client: 429 and 503 mean try again later, 500 is an unexpected error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(f"The server is busy: {error}. Try again later.", status=429, kind="rate_limit_error")
    if isinstance(error, Stopped):
        return ApiError(f"The server is unavailable: {error}.", status=503, kind="server_error")
    return ApiError("The server failed on this request.", status=500, kind="server_error")


def error_response(error: ApiError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSON(error.body, error.status, headers=headers)


async def on_api_error(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))


async def on_http_error(http: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: "There is nothing at", 405: f"{http.method} is not allowed at"}
    return error_response(ApiError(f"{words.get(status, 'Error at')} {http.url.path}.", status=status))


async def on_failure(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))
