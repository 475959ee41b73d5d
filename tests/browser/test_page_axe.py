"""axe-core finds no violation on any state of the chat page, on the board and in a report, in both colour schemes.

The page is usable with what axe does not see: the keyboard alone, four hundred percent of zoom, forced colours.
"""

import json
from pathlib import Path

import pytest

from quern.generate.reply import Delta
from quern.report.build import build
from tests.browser.chrome import Chrome
from tests.browser.parrot import DONE, Page
from tests.browser.test_board import board, open_board
from tests.browser.test_board import write_run as board_run
from tests.browser.test_page_chat import MARKDOWN
from tests.browser.test_page_kept import import_file
from tests.report.synthetic_run import add_rl, write_run
from tests.support.npm import installed

AXE = "axe-core@4.14.1"
RUN = (
    "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map((one) => "
    "[one.id, one.nodes.map((node) => node.html.slice(0, 200) + ' ' + node.failureSummary.slice(0, 300))]))"
)


@pytest.fixture(scope="module")
def axe(pytestconfig: pytest.Config) -> str:
    """The source of axe-core, half a megabyte."""
    folder = installed(pytestconfig.cache.mkdir("npm"), AXE)
    return (folder / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


def check(page: Page, axe: str, state: str, *, narrow: bool = False) -> None:
    """Wide and dark; with `narrow` also as on a phone, in light colours."""
    if not page.run("typeof axe === 'object'"):
        page.run(axe + "; 0")
    for width, dark in ((1100, True), (390, False))[: 1 + narrow]:
        page.chrome.screenshot(Path("/dev/null"), width=width, height=760, dark=dark)
        page.run("new Promise((done) => setTimeout(() => done(1), 250))")  # the list slides
        assert page.run(RUN) == [], f"{state}, {width} pixels, {'dark' if dark else 'light'}"


def test_no_violation_in_any_state(page: Page, axe: str) -> None:
    check(page, axe, "welcome")
    text = MARKDOWN.replace(r"\color{red}", "")  # the colour is the model's own
    page.ask("What is 1 + 1?", "Let me see. ", Delta("tool", "1+1"), Delta("output", "2"), text, reason="length")
    page.click("[aria-label='Try again']")
    page.wait(f"document.querySelectorAll('.walk').length === 1 && {DONE}")
    page.click(".call summary")
    check(page, axe, "a conversation", narrow=True)
    page.click("[aria-label='Edit']")
    check(page, axe, "editing")
    page.press("Escape")
    page.click("#xray")
    page.open_prompt()
    page.run("document.querySelectorAll('.text .token')[2].click()")
    check(page, axe, "x-ray with its card", narrow=True)
    page.press("Escape")
    for button in ("#settings-open", "#shortcuts-open"):
        page.click(button)
        page.run("for (const more of document.querySelectorAll('dialog details')) more.open = true")
        check(page, axe, button)
        page.run("document.querySelector('dialog[open]').close()")
    page.chrome.screenshot(Path("/dev/null"), width=390, height=760)
    page.click("#menu")
    page.run("new Promise((done) => setTimeout(() => done(1), 300))")
    assert page.run(RUN) == []
    page.chrome.open(f"{page.url}/docs")
    page.wait("document.querySelectorAll('section').length > 8")
    page.run("for (const more of document.querySelectorAll('details')) more.open = true")
    assert "messages" in page.texts("td") and "Who are you?" in page.texts("pre")[0]
    check(page, axe, "/docs", narrow=True)


def test_the_keyboard_scrolls_the_conversation_and_keeps_its_place(page: Page) -> None:
    """What a pressed button takes away leaves the focus beside it, not on the page as a whole."""
    page.ask("first", "one")
    page.ask("second", "two\n\n" * 60, reason="length")
    page.run("document.getElementById('settings-open').focus()")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "conversation"
    page.press("Home")
    page.wait("document.getElementById('conversation').scrollTop === 0")
    hebrew = "{key: '\u05dc', code: 'KeyK', ctrlKey: true, bubbles: true}"
    page.run(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {hebrew}))")
    assert page.run("document.activeElement.id") == "search"
    focused = "(document.activeElement.ariaLabel ?? document.activeElement.id)"

    def press(selector: str, then: str, reply: str = "fine", key: str = "Enter") -> None:
        page.engine.will_say(reply)
        page.run(f"document.querySelector({json.dumps(selector)}).focus()")
        page.press(key)
        page.wait(f"{focused} === {json.dumps(then)} && {DONE}")

    last = ".message:last-child"
    press(f"{last} .text-button", "Reply")
    press(f"{last} [aria-label='Try again']", "Reply")
    press(".user [aria-label='Edit']", "Edited message")
    press(".edit textarea", "Reply")
    page.engine.will_say(failure=RuntimeError("no"))
    page.send("third")
    page.problem()
    press("#problem button", "Reply")
    page.click("#new")
    page.ask("other")
    press("[aria-label='Delete first']", "conversations")


def test_the_place_stays_when_another_version_is_shown(page: Page) -> None:
    for number in range(4):
        page.ask(f"{number}?", "word\n\n" * 20)
    page.click(".message:nth-child(2) [aria-label='Try again']", reply="short")
    page.until_said("0?", "short")
    page.click(".message:nth-child(2) [aria-label='Previous version']")
    page.wait("document.querySelectorAll('.message').length === 8 && !document.getElementById('to-end').hidden")
    page.run("new Promise((done) => setTimeout(() => done(1), 200))")
    assert page.run("document.activeElement.getBoundingClientRect().y") > 0, "its buttons are in view"


def test_what_is_done_in_the_list_of_a_phone_is_told_and_undone(page: Page, tmp_path: Path) -> None:
    page.ask("first")
    page.click("#new")
    page.chrome.screenshot(Path("/dev/null"), width=390, height=760)
    page.click("#menu")
    page.click("[aria-label='Delete first']")
    page.wait("document.querySelector('#toast button') !== null")
    box = page.run(
        "(({x, y}) => ({x: x + 9, y: y + 9}))(document.querySelector('#toast button').getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.chrome.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)
    page.wait("document.querySelectorAll('.message').length === 2")
    page.click("#menu")
    import_file(page, tmp_path / "damaged.json", "{")
    assert page.problem() and page.run("document.getElementById('sidebar').inert")


def test_a_short_window_has_room_for_the_conversation(page: Page) -> None:
    """At 400 % of zoom, 1280 x 760 pixels are 320 x 190. A formula that is too wide can be scrolled."""
    page.ask("sum", f"${'x_1 + ' * 60}y$")
    page.chrome.screenshot(Path("/dev/null"), width=320, height=190)
    assert page.run("document.getElementById('conversation').clientHeight") > 80
    wide = "(({scrollWidth, clientWidth}) => scrollWidth > clientWidth && clientWidth < 320)"
    assert page.run(f"{wide}(document.querySelector('math'))")


def test_forced_colours_and_paper_leave_what_only_colours_say(page: Page) -> None:
    page.ask("first")
    page.click("#xray")
    page.wait("document.querySelectorAll('.token.level-1').length > 0")
    page.chrome.send("Emulation.setEmulatedMedia", features=[{"name": "forced-colors", "value": "active"}])
    pairs = (
        ".token.level-1/.text, .level-5/.level-0, #xray/#new, .chosen .open/#new, .modes span/.modes label + label span"
    )
    for pair in pairs.split(", "):
        one, other = (f"getComputedStyle(document.querySelector('{name}')).backgroundColor" for name in pair.split("/"))
        assert page.run(f"{one} !== {other}"), pair
    page.chrome.send("Emulation.setEmulatedMedia", media="print", features=[])
    assert page.run("getComputedStyle(document.querySelector('.token')).printColorAdjust") == "exact"
    page.chrome.send("Emulation.setEmulatedMedia", media="")


def test_no_violation_on_the_board_and_in_a_report(browser: Chrome, axe: str, tmp_path: Path) -> None:
    for seed in range(2):
        board_run(tmp_path, f"run{seed}", seed=seed)
    add_rl(write_run(tmp_path / "runs" / "run0"))
    build(tmp_path / "runs" / "run0")
    with board(tmp_path) as server:
        open_board(browser, server.url)
        browser.run("document.querySelector('#runs tbody input').click()")
        for path in ("", "/report/run0"):
            if path:
                browser.open(server.url + path)
            browser.run(axe + "; for (const one of document.querySelectorAll('details')) one.open = true; 0")
            for width, dark in ((1100, True), (320, False)):
                browser.screenshot(Path("/dev/null"), width=width, height=760, dark=dark)
                assert browser.run(RUN) == [], f"{path or 'board'}, {width} pixels"
                assert browser.run("document.documentElement.scrollWidth") == width


COLOURED = """(() => {
  const canvas = document.querySelector('#plot canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((red, at) => at % 4 === 0 && Math.abs(red - data[at + 2]) > 60).length;
})()"""
"""Counts the pixels of the plot that are not grey."""


def test_the_board_and_a_report_in_forced_colours_on_paper_and_without_storage(browser: Chrome, tmp_path: Path) -> None:
    """Lines of the board have different colours, and a report has its intervals, which are backgrounds."""
    board_run(tmp_path, "other")
    build(write_run(tmp_path / "runs" / "run0"))
    media = {"prefers-color-scheme": "dark", "forced-colors": "active", "prefers-reduced-motion": "reduce"}
    dark, forced, still = ({"name": name, "value": value} for name, value in media.items())
    with board(tmp_path) as server:
        browser.send("Emulation.setEmulatedMedia", features=[dark, forced])
        for storage in "return null", "throw new DOMException('denied', 'SecurityError')":
            denied = f"Object.defineProperty(window, 'localStorage', {{get() {{ {storage}; }}}})"
            script = browser.send("Page.addScriptToEvaluateOnNewDocument", source=denied)
            open_board(browser, server.url)
            browser.send("Page.removeScriptToEvaluateOnNewDocument", **script)
        browser.wait("document.querySelectorAll('#lines .swatch').length === 2")
        colours = "[...document.querySelectorAll('#lines .swatch')].map((one) => getComputedStyle(one).color)"
        first, second = browser.run(colours)
        assert first != second
        assert browser.run(COLOURED) > 99, "the canvas has the colours of the lines"
        browser.open(f"{server.url}/report/run0")
        style = "getComputedStyle(document.querySelector('{}')).{}".format
        assert browser.run(style(".plot .range", "backgroundColor")) != browser.run(style(".plot", "backgroundColor"))
        browser.send("Emulation.setEmulatedMedia", media="print", features=[dark, still])
        assert browser.run(style("body", "color")) == "rgb(37, 33, 27)"
        assert browser.run(style("html", "scrollBehavior")) == "auto"
        assert {browser.run(style(name, "unicodeBidi")) for name in (".completion", ".bubble")} == {"plaintext"}
        assert browser.run(style(".plot .range", "printColorAdjust")) == "exact"
        browser.send("Emulation.setEmulatedMedia", media="", features=[])
    assert browser.problems == []


def test_nothing_is_cut_at_the_edge_of_the_paper(page: Page, tmp_path: Path) -> None:
    board_run(tmp_path, "a-rather-long-name-of-a-run")
    build(write_run(tmp_path / "runs" / "run0"))
    chrome = page.chrome

    def cut(width: int) -> list[str]:
        """What could only be scrolled to."""
        chrome.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        chrome.send("Emulation.setEmulatedMedia", media="print")
        boxes = "[...document.querySelectorAll('.scroll, pre')].filter((box) => box.scrollWidth > box.clientWidth)"
        found = chrome.run(f"{boxes}.map((box) => box.textContent)")
        chrome.send("Emulation.setEmulatedMedia", media="")
        return found

    page.ask("code", f"```\n{'long_name + ' * 40}\n```")
    assert cut(700) == []
    with board(tmp_path) as server:
        open_board(chrome, server.url)
        assert cut(700) == []
        chrome.open(f"{server.url}/report/run0")
        chrome.run("for (const one of document.querySelectorAll('details')) one.open = true")
        assert cut(560) == []
