"""Shared by the tests of the chat page: an engine that says what it is told to, and a hand on the page."""

import codecs
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, cast

from quern.generate.engine import Engine
from quern.generate.reply import Completion, Delta, Event, Generation, Token
from quern.serve.server import create_app
from quern.text.tokenizer import Tokenizer
from tests.browser.chrome import Chrome
from tests.support.http_server import running
from tests.support.toy_engine import toy_engine

READY = "document.body.dataset.ready !== undefined && document.getElementById('model').value !== ''"
DONE = "document.getElementById('send').hidden === false && document.querySelectorAll('.waiting').length === 0"
LOGPROB = -0.25
"""The log-probability of each token that the parrot says."""


class Parrot(Engine):
    """Says its script, piece by piece, at a pace; everything before and after is the real thing.

    A text is said token by token, with log-probabilities if they are asked for. asked: the prompts of each request,
    and its other arguments.
    """

    script: list[Delta]
    coming: list[Any]
    seconds = 0.0
    said = 0
    cached = 0
    failure: BaseException | None = None
    reason: Any = "stop"

    def submit(self, prompts: Any, **arguments: Any) -> Generation:
        self.asked.append(([list(prompt) for prompt in prompts], arguments))
        self._refuse(prompts, 1, 1, [])
        self.open, self.coming = Generation(1), []
        logprobs, start, ids = arguments.get("logprobs"), 0, []
        decoder = codecs.getincrementaldecoder("utf-8")()
        for piece in self.script:
            if piece.kind != "text":
                self.coming.append(piece)
                continue
            for id in self.tokenizer.encode(piece.text):
                text = decoder.decode(self.tokenizer.decode_bytes([id]))
                if logprobs is not None:
                    self.coming.append(Token(id, LOGPROB, alternatives(id, self.tokenizer)[:logprobs], start))
                if text:
                    self.coming.append(Delta("text", text))
                start += len(text)
                ids.append(id)
        text = "".join(piece.text for piece in self.script if piece.kind == "text")
        parts: list[Any] = []
        for kind, pieces in groupby(self.script, key=lambda piece: piece.kind):
            parts.append({"type": kind, "text": "".join(piece.text for piece in pieces)})
        done = Completion([*ids, 1], text, self.reason, parts, len(prompts[0]), cached_tokens=self.cached)
        self.coming.append(done)
        return self.open

    def step(self, most: int | None = None) -> None:
        if not self.coming:  # a prompt was scored: nothing is generated
            return
        if len(self.coming) == 1 and self.failure is not None:
            raise self.failure
        value = self.coming.pop(0)
        if isinstance(value, Delta):
            time.sleep(self.seconds)
            self.said += 1
        elif isinstance(value, Completion):
            self.open.unfinished = 0
        self.open.events.append(Event(0, 0, value))

    def will_say(
        self, *pieces: Delta | str, seconds: float = 0.0, reason: str = "stop", failure: BaseException | None = None
    ) -> None:
        """Sets the script; a failure ends it."""
        self.script = [Delta("text", piece) if isinstance(piece, str) else piece for piece in pieces]
        self.seconds, self.failure, self.reason, self.cached = seconds, failure, reason, 0
        self.said, self.asked, self.coming = 0, [], []


def alternatives(id: int, tokenizer: Tokenizer) -> list[tuple[int, float]]:
    """The token itself, then others, each half as likely as the one before, and the end of a reply."""
    others = [65 + id % 20, 66 + id % 20, tokenizer.special("<|assistant_end|>")]
    return [(id, LOGPROB), *((other, LOGPROB - 2 - place) for place, other in enumerate(others))]


def make_parrot(context: int = 512) -> Parrot:
    engine = toy_engine(context=context)
    made = Parrot(engine.model, engine.tokenizer, engine.machine)
    made.will_say("fine")
    return made


class Page:
    """The chat page in the browser. engine: the server's, which says what it is told to."""

    def __init__(self, chrome: Chrome, url: str, engine: Parrot) -> None:
        self.chrome, self.url, self.engine = chrome, url, engine
        self.run, self.wait, self.press = chrome.run, chrome.wait, chrome.press

    def open(self, *, fresh: bool = True) -> None:
        """Loads the page. fresh: on a wide window, with nothing kept from before."""
        if fresh:
            size = {"width": 1100, "height": 760, "deviceScaleFactor": 1}
            self.chrome.send("Emulation.setDeviceMetricsOverride", **size, mobile=False)
            self.chrome.open("about:blank")
            self.chrome.send("Storage.clearDataForOrigin", origin=self.url, storageTypes="all")
        self.chrome.open(self.url)
        self.chrome.wait(READY)

    def reopen(self) -> None:
        """Loads the page again, and opens the newest conversation."""
        self.open(fresh=False)
        self.click("#conversations .open")

    def click(self, selector: str, index: int = 0, reply: str = "") -> None:
        """reply: what the parrot says to it, where it is told anew."""
        if reply:
            self.engine.will_say(reply)
        self.wait(f"document.querySelectorAll({json.dumps(selector)}).length > {index}")
        self.run(f"document.querySelectorAll({json.dumps(selector)})[{index}].click()")

    def texts(self, selector: str) -> list[str]:
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((box) => box.textContent)")

    def count(self, selector: str) -> int:
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def type(self, selector: str, text: str) -> None:
        """Types over what a field has."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.chrome.type(text)

    def set(self, name: str, value: str) -> None:
        field = f"document.getElementById('set-{name}')"
        self.run(f"{field}.value = {json.dumps(value)}")
        for event in ("input", "change"):
            self.run(f"{field}.dispatchEvent(new Event('{event}'))")

    def send(self, text: str, *reply: Delta | str, **how: Any) -> None:
        """reply, how: of `will_say`, where the parrot is told anew."""
        if reply or how:
            self.engine.will_say(*reply, **how)
        self.type("#input", text)
        self.press("Enter")

    def begin(self, text: str, *reply: Delta | str, **how: Any) -> None:
        self.send(text, *reply, **how)
        self.wait("document.querySelector('.waiting .text') !== null")

    def ask(self, text: str, *reply: Delta | str, **how: Any) -> None:
        """Sends a message and waits for the end of the reply."""
        self.send(text, *reply, **how)
        # The message is there a moment before the reply begins.
        last = "[...document.querySelectorAll('.message')].at(-1)"
        asked = f"[...document.querySelectorAll('.user')].at(-1)?.textContent.includes({json.dumps(text)})"
        self.wait(f"{asked} && {last}.classList.contains('assistant') && {DONE}")

    def problem(self) -> str:
        """Waits for a problem, and returns its text."""
        self.wait(f"!document.getElementById('problem').hidden && {DONE}")
        return self.texts("#problem span")[0]

    def open_prompt(self, tokens: int | None = None, message: str = "") -> None:
        """Shows the prompt of a reply, by default the first. tokens: how many it has; message: its selector."""
        self.click(f"{message} .prompt summary")
        shown = "document.querySelectorAll('.prompt .token').length"
        self.wait(f"{shown} === {tokens}" if tokens else f"{shown} > 2")

    def until_said(self, *texts: str) -> None:
        """Waits until no reply is being written and the messages have these texts."""
        said = "[...document.querySelectorAll('.message .body')].map((box) => box.textContent.trim())"
        self.wait(f"{DONE} && JSON.stringify({said}) === JSON.stringify({json.dumps(texts)})")

    def said(self) -> list[str]:
        """The text of the messages that are shown."""
        return [text.strip() for text in self.texts(".message .body")]


@contextmanager
def visiting(browser: Chrome, engines: dict[str, Engine], **app: Any) -> Iterator[Page]:
    """The page of a server with these engines, as at a first visit. Its console has no errors afterwards."""
    with running(create_app(engines, **app)) as url:
        page = Page(browser, url, cast(Parrot, next(iter(engines.values()))))
        page.open()
        yield page
        browser.open("about:blank")
    assert browser.problems == []
