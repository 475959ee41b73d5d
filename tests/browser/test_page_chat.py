"""The chat page in a real browser, on a real server: sending, streaming, stopping, Markdown, calls, settings, keys."""

import hashlib
import re
import time
from pathlib import Path
from typing import Any

import pytest

from quern.generate.reply import Delta
from quern.generate.sampling import GREEDY
from quern.serve.access import Keys
from quern.serve.gate import Gate
from quern.serve.routes import Welcome
from quern.serve.server import LOOPBACK, create_app
from quern.text.chat import render_prompt
from tests.browser.chrome import Chrome
from tests.browser.parrot import DONE, Page, make_parrot, visiting
from tests.support.http_server import running
from tests.support.toy_engine import toy_engine

MARKDOWN = r"""# A heading

Some **bold**, *slanted* and `code`, a [link](https://example.org/) and ![no image](https://example.org/x.png).

1. first
2. second

| name | share |
|:-----|------:|
| rye  | 12.5  |

```python
def grind(grain):
    return "flour" * grain
```

It costs $5 or $6. Yet $a^2 + b^2 = c^2$ and

$$\frac{1}{2} + \sum_{i=1}^{n} x_i$$

\[ \color{red} \text{end} \]
"""


def test_a_conversation_with_the_real_engine(browser: Chrome) -> None:
    engine = toy_engine(context=512)
    with visiting(browser, {"toy model": engine}) as page:
        assert page.texts("#model option") == ["toy model"]
        page.set("temperature", "0")
        page.set("max_tokens", "30")
        messages: list[Any] = []
        for text in ("Grüß dich 👋🏽", "und?"):
            page.ask(text)
            messages.append({"role": "user", "content": text})
            prompt = render_prompt(engine.tokenizer, messages)
            [[expected]] = toy_engine(context=512).generate([prompt], max_tokens=30, sampling=GREEDY)
            messages.append({"role": "assistant", "content": [dict(part) for part in expected.parts]})
            assert page.texts(".assistant .stats")[-1].startswith(f"{len(expected.ids)} tokens")
        assert page.texts(".user .body") == ["Grüß dich 👋🏽", "und?"]
        # What the browser kept is the reply, whatever Markdown makes of it.
        kept = page.run(
            "new Promise((done) => { indexedDB.open('quern').onsuccess = (event) => "
            "{ event.target.result.transaction('conversations').objectStore('conversations').getAll().onsuccess = "
            "(found) => done(Object.values(found.target.result[0].nodes).map((node) => node.parts)); }; })"
        )
        assert [one for one in kept if one][1::2] == [m["content"] for m in messages if m["role"] == "assistant"]
        page.click("#new")
        assert page.count(".message") == 0 and page.count("#conversations li") == 1


def test_a_reply_streams_and_can_be_stopped(page: Page) -> None:
    engine = page.engine
    page.send("count", " ".join(str(n) for n in range(400)), seconds=0.02)
    page.wait("(document.querySelector('.assistant .body')?.textContent ?? '').startsWith('0 1 2 ')")
    page.wait("/\\d+ tokens · [\\d.]+ tokens\\/s · first after/.test(document.querySelector('.stats').textContent)")
    page.press("Escape")
    page.wait(DONE)
    shown = page.said()[1]
    time.sleep(0.4)
    before = engine.said
    time.sleep(0.3)
    assert engine.said == before < 400, "the server went on after Stop"
    assert page.said()[1] == shown and "stopped" in page.texts(".assistant .stats")[0]
    # What had been said stays in the conversation, which goes on.
    page.ask("and now?", "fine")
    assert page.said() == ["count", shown, "and now?", "fine"]
    assert page.count(".message:last-child .text-button") == 0, "a reply that ended by itself has nothing to continue"


def test_stop_does_not_wait_for_the_tokens_of_a_text(page: Page) -> None:
    page.run("document.querySelector('[name=mode][value=text]').click()")
    page.run(
        "window.fetch = (path, {signal}) => new Promise((_, reject) =>"
        " signal?.addEventListener('abort', () => reject(signal.reason)))"
    )
    page.send("Once")
    page.wait("document.getElementById('stop').hidden === false")
    page.press("Escape")
    page.wait("document.getElementById('problem').textContent.includes('Stopped before the reply began')")


def test_a_cut_reply_is_continued_after_its_last_token(page: Page) -> None:
    engine, tokenizer = page.engine, page.engine.tokenizer
    page.ask("go", "The miller grinds", reason="length")
    [[prompt]], first = [asked[0] for asked in engine.asked], tokenizer.encode("The miller grinds")
    page.click(".assistant .text-button", reply=" the grain")
    page.until_said("go", "The miller grinds the grain")
    assert engine.asked[0][0] == [[*prompt, *first]]
    assert page.texts(".assistant .walk span") == ["2 / 2"]


def test_a_reply_that_an_error_cut_is_told_to_be_so_and_continued(page: Page) -> None:
    page.send("go", "The miller", seconds=0.06, failure=RuntimeError("the server ends"))
    page.problem()
    page.reopen()
    [_, begun] = page.said()
    assert begun.startswith("The") and "stopped" in page.texts(".assistant .stats")[0]
    page.click(".assistant .text-button", reply=" grinds")
    page.until_said("go", f"{begun} grinds")


def test_waiting_shows_a_clock(page: Page) -> None:
    page.send("wait", "x", seconds=0.9)
    page.wait("/reading the prompt · 0\\.[3-9] s/.test(document.querySelector('.stats')?.textContent)")
    page.wait(DONE)
    assert re.search(r"first after \d", page.texts(".assistant .stats")[0])


def test_calls_of_the_calculator_are_cards(page: Page, tmp_path: Path) -> None:
    page.engine.will_say(
        "Let me see. ", Delta("tool", "123 "), Delta("tool", "+ 456"), Delta("output", "579"), "\nIt is 579."
    )
    page.ask("What is 123 + 456?")
    assert page.texts(".call summary") == ["Calculator123 + 456579"]
    assert not page.run("document.querySelector('.call').open")
    page.click(".call summary")
    assert page.run("document.querySelector('.call').open")
    assert page.texts(".call dd") == ["123 + 456", "579"]
    # The next turn tells the model what was called.
    page.ask("Thank you!")
    told = page.engine.tokenizer.decode(page.engine.asked[-1][0][0])
    assert "<|tool_start|>123 + 456<|tool_end|><|output_start|>579<|output_end|>" in told
    for dark in (False, True):
        for width, height in ((1000, 640), (390, 760)):
            page.chrome.screenshot(tmp_path / "page.png", width=width, height=height, dark=dark)
            assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), (width, dark)


@pytest.mark.parametrize("pace", [0.0, 0.002])
def test_markdown_code_tables_and_math(page: Page, pace: float) -> None:
    """The same at once and in a stream, and after loading the page again."""
    page.ask("show", MARKDOWN, seconds=pace)
    page.engine.will_say("")
    shapes = []
    for _ in range(2):
        assert page.texts(".markdown h1") == ["A heading"]
        assert page.texts(".markdown strong") == ["bold"] and page.texts(".markdown em") == ["slanted"]
        assert page.texts(".markdown ol li") == ["first", "second"]
        assert page.texts(".markdown td.to-right, .markdown th.to-right") == ["share", "12.5"]
        assert page.texts(".code pre") == ['def grind(grain):\n    return "flour" * grain\n']
        assert page.texts(".code-head > span") == ["python"]
        assert page.count("math") == 3 and page.count("math mfrac") == 1 and page.count(".math.display") == 2
        assert "It costs $5 or $6." in page.said()[1] and page.count("#messages img") == 0
        links = page.run("[...document.querySelectorAll('.markdown a')].map((a) => [a.href, a.rel, a.target])")
        guarded = ["noopener noreferrer nofollow", "_blank"]
        assert links == [["https://example.org/", *guarded], ["https://example.org/x.png", *guarded]]
        shapes.append(page.run("document.querySelector('.markdown').innerHTML"))
        page.reopen()
    assert shapes[0] == shapes[1]
    page.chrome.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.run("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.click(".copy-code")
    page.wait("document.querySelector('.copy-code').textContent === 'Copied'")
    assert page.run("window.copied") == 'def grind(grain):\n    return "flour" * grain\n'


FORMULAS = {
    "cost: 5$, then 6$": 0,
    "cost: 5$$ and 6$$": 0,
    "$HOME/bin:$PATH": 0,
    "US$, prices in A$": 0,
    "the shell's $$ and $1": 0,
    "$5 or $6": 0,
    "$ a$ and $a $": 0,
    r"\$5 and \$6": 0,
    r"**$a_1$**, ($b$) and $c \$ d$.": 3,
    "the $n$th of all $k$s": 2,
    "设$x$为正数": 1,
    "$$x$$ and \\(y\\)": 2,
}
"""Paragraphs, and how many formulas each has."""


def test_dollars_of_money_and_shells_are_no_formulas(page: Page) -> None:
    page.ask("show", "\n\n".join(FORMULAS))
    found = page.run("[...document.querySelectorAll('.block')].map((box) => box.querySelectorAll('.math').length)")
    assert found == list(FORMULAS.values())
    assert [text.strip() for text in page.texts(".block")[:5]] == list(FORMULAS)[:5]


def press_in_composition(page: Page, key: str) -> None:
    """The key that ends a composition: Safari has ended it before, and other browsers have not."""
    for fields in ("keyCode: 229", "keyCode: 229, isComposing: true", "isComposing: true"):
        event = f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true, cancelable: true, {fields}}})"
        assert page.run(f"document.activeElement.dispatchEvent({event})"), "the key belongs to the input method"


def test_keys_of_an_input_method_are_its_own(page: Page) -> None:
    page.type("#input", "にほん")
    press_in_composition(page, "Enter")
    assert page.count(".message") == 0
    page.engine.will_say("word " * 200, seconds=0.02)
    page.press("Enter")
    page.wait("document.querySelector('.waiting .text') !== null")
    press_in_composition(page, "Escape")
    assert page.count(".waiting") == 1, "the reply goes on"
    page.press("Escape")
    page.wait(DONE)
    page.press("ArrowUp")
    for key in ("Enter", "Escape"):
        press_in_composition(page, key)
        assert page.run("document.activeElement.value") == "にほん", "still being edited"
    page.press("Escape")
    page.click("[aria-label='Rename にほん']")
    for key in ("Enter", "Escape"):
        press_in_composition(page, key)
        assert page.run("document.activeElement.getAttribute('aria-label')") == "Title"


def test_errors_are_told_and_a_reply_is_asked_for_again(page: Page) -> None:
    page.send("hello?", failure=RuntimeError("<img src=x onerror=window.pwned=1>"))
    assert page.problem() == "The server failed on this request."
    assert page.said() == ["hello?"]
    page.click("#problem button", reply="here")
    page.until_said("hello?", "here")
    assert page.run("document.getElementById('problem').hidden")
    # A question that was not answered is replaced by the next one: user and assistant take turns.
    page.send("and?", failure=RuntimeError("again"))
    page.problem()
    page.ask("now?", "well")
    assert page.said() == ["hello?", "here", "now?", "well"]
    # Another try that failed is tried again in its place, not behind the reply that is there.
    page.engine.will_say(failure=RuntimeError("again"))
    page.click(".message:last-child [aria-label='Try again']")
    page.problem()
    page.click("#problem button", reply="very well")
    page.until_said("hello?", "here", "now?", "very well")


def test_a_server_that_was_started_again_with_another_model_is_asked_for_it(page: Page) -> None:
    page.run("document.getElementById('model').replaceChildren(new Option('earlier'))")
    page.send("hello")
    page.wait("document.getElementById('problem').textContent.includes(\"'earlier' does not exist\")")
    page.chrome.problems.clear()  # the browser logs the 404
    page.click("#problem button")
    page.until_said("hello", "fine")
    assert page.texts("#model option") == ["parrot"]


def test_text_from_right_to_left_is_laid_out_so(page: Page) -> None:
    """In Hebrew, the sign that ends a sentence stands on its left."""
    page.ask("שלום!", "**שלום** עולם!\n\n- שלום!\n\nHello world!")
    page.type("#input", "שלום!")
    ends = page.run(
        "[...document.querySelectorAll('.user .text, .block p, .block li, .open, #title')].map((box) => {"
        " const range = document.createRange(), last = box.childNodes[box.childNodes.length - 1];"
        " range.setStart(last, last.length - 1); range.setEnd(last, last.length);"
        " const end = range.getClientRects()[0]; range.setStart(last, 0); range.setEnd(last, 1);"
        " return end.left < range.getClientRects()[0].left; })"
    )
    assert ends == [True, True, True, True, True, False] and page.count(".markdown ul:dir(rtl)") == 1, ends
    assert page.run("getComputedStyle(document.getElementById('input')).unicodeBidi") == "plaintext"


def test_a_conversation_longer_than_the_context_goes_on(browser: Chrome) -> None:
    engine = make_parrot(context=96)
    engine.will_say("the miller grinds the grain at dawn")
    with visiting(browser, {"parrot": engine}) as page:
        page.ask("and the stone, does it hum?")
        assert re.fullmatch(r"context: \d+ of 96 tokens", page.texts("#fill-text")[0])
        page.ask("and the stone, does it hum?")
        page.send("and the stone, does it hum?")  # once the context is full, the user is asked
        assert "the model's context holds 96" in page.problem() and not page.texts(".note")
        page.click("#problem button")
        page.wait(f"document.getElementById('problem').hidden && {DONE}")
        page.ask("and the stone, does it hum?")  # and not again
        assert page.texts(".note") and "were left out" in page.texts(".note")[-1]
        assert page.run("document.getElementById('problem').hidden")
        # A message that is too long by itself is told, and can be edited.
        page.send("and the stone, does it hum? " * 20)
        assert "context holds 96 tokens" in page.problem()
        assert {problem.split(":")[0] for problem in browser.problems} == {"Failed to load resource"}  # the 400s
        browser.problems.clear()


def test_settings_reach_the_model_and_are_kept(page: Page) -> None:
    page.press(",", ctrl=True)
    page.wait("document.getElementById('settings').open")
    for name, value in (("temperature", ""), ("max_tokens", "77"), ("top_k", "5"), ("min_p", "7"), ("seed", "3")):
        page.set(name, value)
    why = "document.getElementById('set-min_p-why')"
    assert page.run("document.getElementById('set-min_p').getAttribute('aria-invalid')") == "true"
    assert page.run(f"{why}.textContent") == "Give a number from 0 to 1; until then, the server's own value is used."
    page.set("temperature", "0.83")  # between two steps of its arrows
    page.set("temperature", "")
    page.type("#system", "You are a miller.")
    page.set("stop", "END")
    page.press("Escape")
    page.wait("!document.getElementById('settings').open")
    page.ask("well?")
    [prompt], asked = page.engine.asked[-1]
    sampling = asked["sampling"]
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (1.0, 5, 0.0)
    assert (asked["max_tokens"], asked["seed"], asked["stop"], asked["logprobs"]) == (77, 3, ["END"], 10)
    assert page.engine.tokenizer.decode(prompt).startswith("<|bos|><|system_start|>You are a miller.<|system_end|>")
    page.set("theme", "dark")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(25, 24, 22)"
    page.open(fresh=False)
    assert page.run("document.getElementById('set-top_k').value") == "5"
    assert page.run("document.documentElement.dataset.theme") == "dark"


def test_keys_and_the_list(page: Page) -> None:
    page.ask("one")
    page.press("o", ctrl=True, shift=True)
    page.wait("document.querySelectorAll('.message').length === 0")
    page.press("k", ctrl=True)
    assert page.run("document.activeElement.id") == "search"
    page.press("b", ctrl=True)
    assert page.run("getComputedStyle(document.getElementById('sidebar')).display") == "none"
    page.press("b", ctrl=True)
    page.press("/", ctrl=True)
    assert page.run("document.getElementById('shortcuts').open")
    page.press("Escape")
    page.wait("!document.getElementById('shortcuts').open")
    page.press("x", ctrl=True, shift=True)
    assert page.run("document.getElementById('xray').getAttribute('aria-pressed')") == "true"
    # On a phone the list lies over the conversation, and what is under it cannot be reached.
    page.chrome.screenshot(Path("/dev/null"), width=390, height=760)
    page.wait("document.getElementById('sidebar').inert")
    page.click("#menu")
    assert page.run("document.getElementById('main').inert && !document.getElementById('sidebar').inert")
    page.press("Escape")
    assert page.run("!document.getElementById('main').inert && document.getElementById('sidebar').inert")


def test_suggestions_begin_a_conversation(page: Page) -> None:
    page.wait("document.querySelectorAll('#suggestions button').length === 2")
    assert page.texts("#suggestions button") == ["What is 2 + 3?", "Tell me a story."]
    page.click("#suggestions button", 1)
    page.until_said("Tell me a story.", "fine")


def test_a_server_with_keys_asks_for_one(browser: Chrome) -> None:
    engine = make_parrot()
    keys = Keys({hashlib.sha256(b"secret").digest(): "alice"})
    with running(create_app({"parrot": engine}, Gate(LOOPBACK, keys), welcome=Welcome(completes=["parrot"]))) as url:
        page = Page(browser, url, engine)
        browser.open(url)
        page.wait("document.getElementById('settings').open && !document.getElementById('problem').hidden")
        assert page.run("document.activeElement.id") == "set-key"
        browser.type("secret\u200b")  # pasted with a character that no header may have
        page.run("document.getElementById('settings').close()")
        page.wait("document.body.dataset.mode === 'text' && document.getElementById('problem').hidden")
        page.ask("hello")
        assert page.said() == ["hello", "fine"]
        assert "secret" not in page.run("JSON.stringify(localStorage)")
        page.run("sessionStorage.clear()")
        browser.open(url)
        page.wait("document.getElementById('settings').open")
        for blank in (False, True):  # in the same tab, the page is not loaded again
            if blank:
                browser.open("about:blank")
            browser.open(f"{url}/#key=secret")  # the link that `quern serve --lan` prints
            page.wait(
                "document.getElementById('model').value === 'parrot' && document.getElementById('problem').hidden"
            )
            assert page.run("location.href") == f"{url}/" and not page.run("document.getElementById('settings').open")
    assert {problem.split(":")[0] for problem in browser.problems} == {"Failed to load resource"}  # the 401
    browser.problems.clear()


def test_a_reader_who_scrolls_up_is_left_there(page: Page) -> None:
    view = "document.getElementById('conversation')"
    page.ask("one", "The miller grinds.\n\n" * 25)
    distance = f"{view}.scrollHeight - {view}.scrollTop - {view}.clientHeight"
    page.wait(f"{distance} < 5")
    page.send("two", "The stone hums.\n\n" * 60, seconds=0.005)
    page.wait("document.querySelectorAll('.message:last-child .block').length > 5")
    for _ in range(2):
        page.chrome.send("Input.dispatchMouseEvent", type="mouseWheel", x=600, y=300, deltaX=0, deltaY=-500)
        page.run("new Promise((done) => setTimeout(() => done(1), 150))")
    page.wait("!document.getElementById('to-end').hidden")
    at = page.run(f"{view}.scrollTop")
    page.wait(DONE)
    assert abs(page.run(f"{view}.scrollTop") - at) < 5 and page.run(distance) > 200
    page.click("#to-end")
    page.wait(f"{distance} < 5 && document.getElementById('to-end').hidden")
