"""The chat page's files and what the page asks of its own server: how to begin.

The files are in web/; the table of their paths is built with the application, so a request never names a file on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

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
    """How the page begins. completes: the model continues texts and was never taught to chat."""

    suggestions: Sequence[str] = field(default=())
    completes: bool = False


def read_welcome(run: Path, stage: str) -> Welcome:
    """The first turns of the run's own samples of a stage, which `quern evaluate` keeps; none without them.

    Args:
        run: The run's folder.
        stage: The stage whose model is served.
    """
    file, asked = run / "samples.jsonl", dict[str, None]()
    for sample in read_lines(file) if file.exists() else []:
        text = _opening(sample) if sample.get("stage") == stage else None
        if text and len(text) <= MOST_SUGGESTION_CHARACTERS and "\n" not in text:
            asked[text] = None
    return Welcome(_spread(list(asked), MOST_SUGGESTIONS), stage == "pretrain")


def _opening(sample: Mapping[str, Any]) -> str | None:
    turns = sample.get("messages") or [{"content": sample.get("prompt")}]
    text = turns[0].get("content")
    return text.strip() if isinstance(text, str) else None


def _spread(texts: Sequence[str], most: int) -> tuple[str, ...]:
    """At most so many of the texts, evenly spread: neighbouring samples are of one kind."""
    count = min(most, len(texts))
    return tuple(texts[number * len(texts) // count] for number in range(count))


def page_paths() -> dict[str, Path]:
    """The files of the page by the paths of their URLs."""
    files = [file for file in sorted(WEB.rglob("*")) if file.suffix in MEDIA_TYPES]
    return {"/" if file.name == "index.html" else f"/{file.relative_to(WEB).as_posix()}": file for file in files}


def add_page(app: FastAPI, welcome: Welcome) -> None:
    """Adds a route for each file of web/, and GET /welcome."""
    for path, file in page_paths().items():
        send = _sender(file.read_bytes(), MEDIA_TYPES[file.suffix])
        app.add_api_route(path, send, methods=["GET"], include_in_schema=False)
    body = {"suggestions": list(welcome.suggestions), "mode": "text" if welcome.completes else "chat"}

    @app.get("/welcome", include_in_schema=False)
    async def show_welcome() -> Response:
        return JSON(body)


def _sender(content: bytes, media_type: str) -> Callable[[], Any]:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    return send
