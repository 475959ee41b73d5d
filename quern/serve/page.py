"""The chat page's files and what the page asks of its own server: how to begin.

The files are in web/; the table of their paths is built with the application, so a request never names a file on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quern.generate.sampling import CHAT
from quern.records import read_lines
from quern.serve.answers import JSON

WEB = Path(__file__).parent / "web"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
MOST_SUGGESTIONS = 6
MOST_SUGGESTION_CHARACTERS = 160


@dataclass(frozen=True)
class Welcome:
    """The beginning of the page. completes: the model continues texts and was never taught to chat."""

    suggestions: Sequence[str] = ()
    completes: bool = False


def read_welcome(run: Path, stage: str) -> Welcome:
    """The first turns of the run's own samples of a stage, which `quern evaluate` keeps; none without them."""
    file, asked = run / "samples.jsonl", dict[str, None]()
    for sample in read_lines(file) if file.exists() else []:
        text = (sample.get("messages") or [{"content": sample.get("prompt")}])[0].get("content")
        text = text.strip() if isinstance(text, str) and sample.get("stage") == stage else ""
        if text and len(text) <= MOST_SUGGESTION_CHARACTERS and "\n" not in text:
            asked[text] = None
    found, count = list(asked), min(MOST_SUGGESTIONS, len(asked))  # evenly spread: neighbours are of one kind
    return Welcome(tuple(found[number * len(found) // count] for number in range(count)), stage == "pretrain")


def page_paths() -> dict[str, Path]:
    """The files of the page by the paths of their URLs."""
    files = [file for file in sorted(WEB.rglob("*")) if file.suffix in MEDIA_TYPES]
    named = {"index.html": "/", "docs.html": "/docs"}
    return {named.get(file.name, f"/{file.relative_to(WEB).as_posix()}"): file for file in files}


def page_routes(welcome: Welcome) -> list[Route]:
    """A route for each file of web/, and GET /welcome."""
    body = {
        "suggestions": list(welcome.suggestions),
        "mode": "text" if welcome.completes else "chat",
        "sampling": {"temperature": CHAT.temperature, "top_k": CHAT.top_k},
    }

    async def show_welcome(_: Request) -> Response:
        return JSON(body)

    def route(path: str, content: bytes, media_type: str) -> Route:
        async def send(_: Request) -> Response:
            return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

        return Route(path, send, methods=["GET"])

    files = page_paths().items()
    return [
        Route("/welcome", show_welcome, methods=["GET"]),
        *(route(path, file.read_bytes(), MEDIA_TYPES[file.suffix]) for path, file in files),
    ]
