"""The chat page in a real browser, on a real server: sending, streaming, stopping, hostile text."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.generate.engine import Engine
from quern.generate.reply import Completion, Delta
from quern.generate.sample import GREEDY
from quern.generate.scheduler import Event, Generation
from quern.serve.server import create_app
from quern.text.chat import render_prompt
from tests.browser.chrome import Chrome, find_chrome
from tests.support.http_server import running
from tests.support.toy_engine import toy_engine

pytestmark = pytest.mark.skipif(find_chrome() is None, reason="needs Chromium or Chrome on the PATH")

PAYLOADS = (
    '<img src=x onerror="window.pwned=1">',
    "<script>window.pwned=1</script>",
    "<svg onload=window.pwned=1>",
    "</div><iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<a href='javascript:window.pwned=1'>x</a>",
    '&lt;b&gt; &amp; "quotes" `ticks` ${1+1} {{7*7}}',
)
DONE = "document.getElementById('stop').hidden && document.querySelectorAll('.waiting').length === 0"


class Parrot(Engine):
    """Says what it is told to, piece by piece, at a pace; everything before and after is the real thing."""

    script: list[Delta] = []
    seconds = 0.0
    said = 0
    failure: Exception | None = None

    def submit(self, prompts: Any, **arguments: Any) -> Generation:
        text = "".join(piece.text for piece in self.script if piece.kind == "text")
        end = Completion([1] * len(self.script), text, "stop", [], len(prompts[0]))
        self.open, self.coming = Generation(1), [*self.script, end]
        return self.open

    def step(self, prefill_tokens: int | None = None) -> None:
        if len(self.coming) == 1 and self.failure is not None:
            raise self.failure
        value = self.coming.pop(0)
        if isinstance(value, Delta):
            time.sleep(self.seconds)
            self.said += 1
        else:
            self.open.unfinished = 0
        self.open.events.append(Event(0, 0, value))


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    browser = Chrome(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def no_problems(chrome: Chrome) -> Iterator[None]:
    chrome.problems.clear()
    yield
    assert chrome.problems == []


def parrot() -> Parrot:
    engine = toy_engine(context=512)
    return Parrot(engine.model, engine.tokenizer, engine.machine)


def log(chrome: Chrome, text: str) -> None:
    chrome.run("document.getElementById('input').focus()")
    chrome.type(text)
    chrome.press_enter()


def texts(chrome: Chrome, role: str) -> list[str]:
    return chrome.run(f"[...document.querySelectorAll('.message.{role}')].map((box) => box.textContent)")


def test_a_conversation_with_the_real_engine(chrome: Chrome) -> None:
    engine = toy_engine(context=512)
    with running(create_app({"toy model": engine})) as url:
        chrome.open(url)
        chrome.wait("document.getElementById('model').textContent === 'toy model'")
        chrome.run("document.getElementById('temperature').value = 0")
        chrome.run("document.getElementById('limit').value = 30")
        messages: list[Any] = []
        for turn, text in enumerate(("Grüß dich 👋🏽", "und?")):
            log(chrome, text)
            chrome.wait(f"document.querySelectorAll('.user').length === {turn + 1} && {DONE}")
            messages.append({"role": "user", "content": text})
            expected = toy_engine(context=512).generate(
                [render_prompt(engine.tokenizer, messages)], max_tokens=30, sampling=GREEDY
            )[0][0]
            messages.append({"role": "assistant", "content": [dict(part) for part in expected.parts]})
            shown = texts(chrome, "assistant")
            if expected.text:
                assert shown[-1] == expected.text
        assert texts(chrome, "user") == ["Grüß dich 👋🏽", "und?"]
        chrome.run("document.getElementById('clear').click()")
        assert chrome.run("document.querySelectorAll('.message').length") == 0


def test_a_reply_streams_and_can_be_stopped(chrome: Chrome) -> None:
    engine = parrot()
    engine.script, engine.seconds = [Delta("text", f"{n} ") for n in range(400)], 0.03
    with running(create_app({"parrot": engine})) as url:
        chrome.open(url)
        log(chrome, "count")
        chrome.wait("(document.querySelector('.assistant')?.textContent ?? '').startsWith('0 1 2 ')")
        assert not chrome.run("document.getElementById('stop').hidden")
        chrome.run("document.getElementById('stop').click()")
        chrome.wait(DONE)
        [shown] = texts(chrome, "assistant")
        time.sleep(0.5)
        before = engine.said
        time.sleep(0.3)
        assert engine.said == before < 400, "the server went on after Stop"
        assert texts(chrome, "assistant") == [shown]
        # What had been said stays in the conversation, which goes on.
        engine.script, engine.seconds = [Delta("text", "fine")], 0.0
        log(chrome, "and now?")
        chrome.wait(f"document.querySelectorAll('.assistant').length === 2 && {DONE}")
        assert texts(chrome, "assistant") == [shown, "fine"]


def test_calls_of_the_calculator_are_shown_as_such(chrome: Chrome, tmp_path: Path) -> None:
    engine = parrot()
    engine.script = [
        Delta("text", "Let me work it out. "),
        Delta("tool", "123 "),
        Delta("tool", "+ 456"),
        Delta("output", "579"),
        Delta("text", "\nSo Mira carries 579 sacks of flour to the mill."),
    ]
    with running(create_app({"quern-d4": engine})) as url:
        chrome.open(url)
        log(chrome, "Mira has 123 sacks and gets 456 more. How many does she carry?")
        chrome.wait(f"document.querySelectorAll('.tool').length === 2 && {DONE}")
        spans = chrome.run("[...document.querySelectorAll('.tool')].map((span) => span.textContent)")
        assert spans == ["123 + 456", "= 579"]
        log(chrome, "Thank you!")
        chrome.wait(f"document.querySelectorAll('.assistant').length === 2 && {DONE}")
        for dark in (False, True):
            for width, height in ((900, 640), (390, 760)):
                path = tmp_path / f"{'dark' if dark else 'light'}-{width}.png"
                chrome.screenshot(path, width=width, height=height, dark=dark)
                assert path.stat().st_size > 5000
                wide = chrome.run("document.documentElement.scrollWidth <= window.innerWidth")
                assert wide, f"the page is wider than a window of {width} pixels"


def test_hostile_text_is_only_ever_text(chrome: Chrome) -> None:
    engine = parrot()
    for payload in PAYLOADS:
        engine.failure = None
        engine.script = [Delta("text", payload[:5]), Delta("text", payload[5:]), Delta("tool", payload)]
        with running(create_app({payload: engine})) as url:
            chrome.open(url)
            chrome.wait("document.getElementById('model').textContent !== ''")
            assert chrome.run("document.getElementById('model').textContent") == payload
            log(chrome, payload)
            chrome.wait(f"document.querySelectorAll('.assistant').length === 1 && {DONE}")
            assert texts(chrome, "user") == [payload]
            assert texts(chrome, "assistant") == [payload + payload]
            markup = "img, iframe, svg, script:not([src='/chat.js']), #conversation a"
            assert chrome.run(f'document.querySelectorAll("{markup}").length') == 0
            assert chrome.run("typeof window.pwned") == "undefined"


def test_errors_are_told_and_the_message_comes_back(chrome: Chrome) -> None:
    engine = parrot()
    engine.script, engine.failure = [], RuntimeError("<img src=x onerror=window.pwned=1>")
    with running(create_app({"broken": engine})) as url:
        chrome.open(url)
        log(chrome, "hello?")
        chrome.wait("document.querySelectorAll('.error').length === 1")
        assert texts(chrome, "error") == ["The server failed on this request."]
        assert chrome.run("document.getElementById('input').value") == "hello?"
        engine.script, engine.failure = [Delta("text", "here")], None
        chrome.press_enter()
        chrome.wait(f"document.querySelectorAll('.assistant').length === 1 && {DONE}")
        assert texts(chrome, "assistant") == ["here"]


def test_a_conversation_longer_than_the_context_begins_anew(chrome: Chrome) -> None:
    engine = toy_engine(context=64)
    parrot = Parrot(engine.model, engine.tokenizer, engine.machine)
    parrot.script = [Delta("text", "the miller grinds the grain at dawn")]
    with running(create_app({"parrot": parrot})) as url:
        chrome.open(url)
        for turn in range(1, 5):
            log(chrome, "and the stone, does it hum?")
            chrome.wait(f"document.querySelectorAll('.assistant').length === {turn} && {DONE}")
        notes = chrome.run("[...document.querySelectorAll('.note')].map((line) => line.textContent)")
        assert notes and set(notes) == {
            "The conversation is longer than the model's 64 tokens: it begins anew with the last message."
        }
        assert texts(chrome, "error") == []
        # A message that is too long by itself is told, and comes back.
        long = "and the stone, does it hum? " * 20
        log(chrome, long)
        chrome.wait(f"document.querySelectorAll('.error').length === 1 && {DONE}")
        assert "context holds 64 tokens" in texts(chrome, "error")[0]
        assert chrome.run("document.getElementById('input').value") == long.strip()
        assert chrome.run("document.getElementById('input').offsetHeight") > 100
        chrome.run("document.getElementById('clear').click()")
        assert chrome.run("document.querySelectorAll('.message, .note').length") == 0
    assert {problem.split(":")[0] for problem in chrome.problems} == {"Failed to load resource"}  # the 400s
    chrome.problems.clear()


def test_empty_settings_are_the_servers_own(chrome: Chrome) -> None:
    engine = parrot()
    engine.script = [Delta("text", "fine")]
    with running(create_app({"parrot": engine})) as url:
        chrome.open(url)
        for name in ("temperature", "limit"):
            chrome.run(f"document.getElementById('{name}').value = ''")
        log(chrome, "well?")
        chrome.wait(f"document.querySelectorAll('.assistant').length === 1 && {DONE}")
        assert texts(chrome, "assistant") == ["fine"]


def test_the_checks_would_notice(chrome: Chrome) -> None:
    """Inserted markup is found by the same query, and the policy stops and reports its script."""
    engine = parrot()
    with running(create_app({"parrot": engine})) as url:
        chrome.open(url)
        chrome.run(f"document.getElementById('conversation')['inner' + 'HTML'] = {PAYLOADS[0]!r}")
        assert chrome.run("document.querySelectorAll('img').length") == 1
        chrome.wait("new Promise((done) => setTimeout(() => done(true), 200))")
        assert chrome.run("typeof window.pwned") == "undefined"
        assert any("Content Security Policy" in problem for problem in chrome.problems)
        chrome.problems.clear()
