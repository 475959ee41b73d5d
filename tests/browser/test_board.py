"""The board in a real browser, on a real server: curves, groups, keyboard, themes, live runs, hostile text."""

import itertools
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quern.lab.board.server import WEB, BoardOptions, Server
from tests.browser.chrome import Chrome
from tests.support.rows import write_rows

ROOT = Path(__file__).resolve().parents[2]
BITS = "Validation, bits per byte"
AXES = ("step", "tokens", "flops", "seconds")
PAYLOAD = "<img src=x onerror='window.pwned=1'>"


def write_run(out: Path, name: str, *, seed: int = 0, lr: float = 0.02, steps: int = 400, done: bool = True) -> Path:
    folder = out / "runs" / name / "pretrain"
    events = [{"kind": "start", "step": 0, "steps": 400}, *([{"kind": "finish", "step": steps}] if done else [])]
    write_rows(folder / "events.jsonl", events)
    recipe = {"seed": seed, "depth": 4, "optim": {"matrix_lr": lr}, "train": {"eval_every": 50, "steps": 400}}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "metrics.jsonl").write_text("".join(line(step, seed + lr) for step in range(10, steps + 1, 10)))
    return folder


def line(step: int, above: float) -> str:
    tokens = step * 1000
    fields = {"step": step, "tokens": tokens, "flops": tokens * 1e6, "seconds": step / 4}
    text = json.dumps(fields | {"loss": 2 + 5 / math.sqrt(step) + above / 10, "tokens_per_second": 4e3}) + "\n"
    if step % 50 == 0:
        text += json.dumps(fields | {"val_bpb": 1 + 2 / math.sqrt(step) + above / 10}) + "\n"
    return text


def write_study(out: Path) -> None:
    folder = out / "lab" / "night"
    recipes = {"gpt": {"depth": 4, "optim": {"lr": 0.1}}, "idea": {"depth": 4, "optim": {"lr": 0.2}}}
    write_rows(folder / "arms.jsonl", ({"arm": arm, "recipe": recipe} for arm, recipe in recipes.items()))
    (folder / "study.json").write_text(json.dumps({"base": "gpt", "delta": 0.002}))
    trials = []
    for seed, arm in itertools.product(range(3), recipes):
        curve = [dict.fromkeys(AXES, s) | {"bpb": 1 + seed / 9 + 1 / s} for s in (1, 2, 4)]
        trials.append({"recipe": arm, "seed": seed, "steps": 4, "bpb": curve[-1]["bpb"], "curve": curve})
    write_rows(folder / "trials.jsonl", trials)
    verdict = {"idea": "idea", "axis": "steps", "n": 3, "mean": -0.125, "low": -0.25, "high": None}
    (folder / "verdicts.json").write_text(json.dumps([verdict | {"verdict": "better, small"}]))


@pytest.fixture(autouse=True)
def chrome(browser: Chrome) -> Iterator[Chrome]:
    browser.problems.clear()
    yield browser
    assert browser.problems == []


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for lr in (0.02, 0.04):
        for seed in range(3):
            write_run(tmp_path, f"lr{lr}-s{seed}", seed=seed, lr=lr)
    write_study(tmp_path)
    return tmp_path


@contextmanager
def board(out: Path) -> Iterator[Server]:
    with Server(BoardOptions(out, port=0)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(30)


@pytest.fixture
def url(out: Path) -> Iterator[str]:
    with board(out) as server:
        yield server.url


def open_board(chrome: Chrome, url: str, view: str = "") -> None:
    chrome.open("about:blank")
    chrome.open(f"{url}/{view}")
    chrome.wait("document.querySelector('#plot canvas') !== null && document.querySelector('#runs tbody tr') !== null")


def choose(chrome: Chrome, name: str, value: str, event: str = "input") -> None:
    chrome.run(
        f"(() => {{ const field = document.getElementById('{name}'); field.value = {json.dumps(value)};"
        f"field.dispatchEvent(new Event('{event}', {{bubbles: true}})); }})()"
    )


def text(chrome: Chrome, selector: str) -> str:
    return chrome.run(f"document.querySelector({json.dumps(selector)}).textContent")


def rows(chrome: Chrome, table: str) -> list[list[str]]:
    return chrome.run(
        f"[...document.querySelectorAll('#{table} tbody tr')].map((row) => "
        "[...row.cells].map((cell) => cell.textContent))"
    )


def until_rows(chrome: Chrome, table: str, count: int) -> None:
    chrome.wait(f"document.querySelectorAll('#{table} tbody tr').length === {count}")


def pixels(chrome: Chrome) -> str:
    """The picture of the plot, as a PNG."""
    return chrome.run("document.querySelector('#plot canvas').toDataURL()")


def test_curves_axes_groups_and_filter(chrome: Chrome, url: str) -> None:
    open_board(chrome, url)
    assert text(chrome, "#plot-heading") == f"{BITS} over steps"
    names = [f"lr{lr}-s{seed} pretrain" for lr in (0.02, 0.04) for seed in range(3)]
    assert [row[0] for row in rows(chrome, "lines")] == names
    assert rows(chrome, "lines")[0][1] == "1.1020"  # 1 + 2 / sqrt(400) + 0.02 / 10
    pictures = [pixels(chrome)]
    for x, words in (("tokens", "tokens"), ("flops", "training FLOPs"), ("seconds", "seconds in steps")):
        choose(chrome, "x", x)
        chrome.wait(f"document.getElementById('plot-heading').textContent === '{BITS} over {words}'")
        pictures.append(pixels(chrome))
    choose(chrome, "y", "loss")
    chrome.wait("document.getElementById('plot-heading').textContent.startsWith('Training loss, nats per token over')")
    pictures.append(pixels(chrome))
    chrome.run("document.getElementById('logy').click()")
    pictures.append(pixels(chrome))
    assert len(set(pictures)) == len(pictures), "a choice did not change the plot"
    choose(chrome, "group", "optim.matrix_lr")
    until_rows(chrome, "lines", 2)
    values = [2 + 5 / 20 + (seed + 0.02) / 10 for seed in range(3)]
    assert rows(chrome, "lines")[0] == ["0.02", "3", f"{sum(values) / 3:.4f}", "± 0.1"]
    choose(chrome, "group", "*")
    chrome.wait("document.querySelector('#lines tbody th').textContent === 'matrix_lr 0.02'")
    choose(chrome, "filter", "matrix_lr=0.04")
    until_rows(chrome, "lines", 1)
    assert [row[1] for row in rows(chrome, "runs")] == ["lr0.04-s0", "lr0.04-s1", "lr0.04-s2"]
    over = "document.querySelector('#plot .u-over')"
    for kind, x in (("mouseMoved", 300), ("mousePressed", 300), ("mouseMoved", 400), ("mouseReleased", 400)):
        place = chrome.run(f"(({{x, y}}) => [x, y])({over}.getBoundingClientRect())")
        where = {"x": place[0] + x, "y": place[1] + 50}
        chrome.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)
        if kind == "mousePressed":
            assert text(chrome, "#lines-note").startswith("at "), "the pointer does not read values"
    chrome.wait("!document.getElementById('reset').hidden")
    chrome.run("document.getElementById('reset').click()")
    # The address keeps the view.
    open_board(chrome, url, chrome.run("location.hash"))
    assert text(chrome, "#plot-heading") == "Training loss, nats per token over seconds in steps"
    assert len(rows(chrome, "runs")) == 3
    chrome.run("location.hash = 'runs-heading', location.hash = 'filter=s1'")  # a bookmark, in the same tab
    until_rows(chrome, "runs", 2)
    assert text(chrome, "#plot-heading") == f"{BITS} over steps"


def test_stages_stand_under_their_run_which_is_opened_renamed_and_removed(chrome: Chrome, url: str, out: Path) -> None:
    run = out / "runs" / "lr0.02-s0"
    shutil.copytree(run / "pretrain", run / "sft")
    (out / "runs" / "lr0.04-s2" / "pretrain").rename(out / "runs" / "lr0.04-s2" / "grug")
    (run / "report.html").write_text("<!doctype html><title>of s0</title><h2 id='samples'>Samples</h2>")
    open_board(chrome, url)
    names = "[...document.querySelectorAll('#runs tbody th')].map((cell) => cell.className + ' ' + cell.textContent)"
    assert chrome.run(names)[:3] == ["name lr0.02-s0", "name under lr0.02-s0", "name lr0.02-s1"]
    assert [row[-1] for row in rows(chrome, "runs")][:3] == ["report samples chat", "", "chat"]
    assert rows(chrome, "runs")[-1][-1] == "", "the server takes no model of JAX"
    grouped = "[...document.getElementById('group').options].map((one) => one.value)"
    assert chrome.run(grouped) == ["", "*", "@stage", "@status", "optim.matrix_lr", "seed"]

    def manage(name: str, action: str) -> None:
        chrome.run(f"document.querySelector('[aria-label=\\'Select {name} pretrain\\']').click()")
        chrome.run(f"document.getElementById('{action}').click()")

    manage("lr0.02-s1", "rename")
    for new, told in (("lr0.02-s2", "there is a run 'lr0.02-s2' already"), ("../x", "../x")):
        chrome.run(f"document.getElementById('new-name').value = '{new}'; document.getElementById('manage-do').click()")
        chrome.wait(f"document.getElementById('manage-problem').textContent.includes({json.dumps(told)})")
    chrome.run("document.getElementById('new-name').value = 'best'; document.getElementById('manage-do').click()")
    chrome.wait("document.getElementById('runs-said').textContent.includes(\"is now 'best'\")")
    assert (out / "runs" / "best").is_dir() and "best" in [row[1] for row in rows(chrome, "runs")]
    manage("best", "remove")
    chrome.run("document.getElementById('manage-cancel').click()")
    assert (out / "runs" / "best").is_dir()
    chrome.run("document.getElementById('remove').click(); document.getElementById('manage-do').click()")
    chrome.wait("document.getElementById('runs-said').textContent.includes('removed')")
    assert not (out / "runs" / "best").exists() and "best" not in [row[1] for row in rows(chrome, "runs")]
    chrome.problems[:] = [one for one in chrome.problems if "400" not in one]
    chrome.open(f"{url}/report/lr0.02-s0#samples")
    assert chrome.run("document.title") == "of s0"


def test_the_table_sorts_and_two_runs_are_compared(chrome: Chrome, url: str) -> None:
    open_board(chrome, url)
    for order in ("ascending", "descending"):
        button = f"[...document.querySelectorAll('#runs thead button')].find((b) => b.textContent === '{BITS}')"
        chrome.run(f"{button}.click()")
        shown = [float(row[6]) for row in rows(chrome, "runs")]
        assert shown == sorted(shown, reverse=order == "descending")
        head = f"[...document.querySelectorAll('#runs thead th')].find((cell) => cell.textContent === '{BITS}')"
        assert chrome.run(f"{head}.getAttribute('aria-sort')") == order
        assert chrome.run("document.activeElement.tagName") in ("BODY", "BUTTON")
    assert chrome.run("document.getElementById('diff-scroll').hidden")
    for name in ("lr0.02-s1", "lr0.04-s2"):
        chrome.run(f"document.querySelector('[aria-label=\"Select {name} pretrain\"]').click()")
    assert rows(chrome, "diff") == [["optim.matrix_lr", "0.02", "0.04"], ["seed", "1", "2"]]
    assert text(chrome, "#diff-note") == "2 fields differ; 3 equal."
    assert [row[0] for row in rows(chrome, "lines")] == ["lr0.04-s2 pretrain", "lr0.02-s1 pretrain"]
    chrome.run("document.getElementById('clear').click()")
    assert chrome.run("document.getElementById('diff-scroll').hidden") and len(rows(chrome, "lines")) == 6


def test_the_keyboard_is_enough(chrome: Chrome, url: str) -> None:
    open_board(chrome, url)
    chrome.press("/")
    assert chrome.run("document.activeElement.id") == "filter"
    chrome.type("s0")
    until_rows(chrome, "runs", 2)
    focused = "(({id, ariaLabel, textContent}) => id || ariaLabel || textContent)(document.activeElement)"
    reached = []
    for _ in range(40):
        chrome.press("Tab")
        reached.append(chrome.run(focused))
        if reached[-1].startswith("Select lr"):
            break
    order = ["smooth", "logx", "logy", "plot", "Run", "Select lr0.02-s0 pretrain"]
    assert [name for name in reached if name in order] == order, reached
    chrome.press(" ")
    until_rows(chrome, "lines", 1)
    assert chrome.run("document.activeElement.ariaLabel") == "Select lr0.02-s0 pretrain", "the focus was lost"
    chrome.run("document.getElementById('plot').focus()")
    chrome.press("Home")
    chrome.press("ArrowRight", 3)
    chrome.wait("document.getElementById('spoken').textContent.startsWith('At ')")
    assert "lr0.02-s0 pretrain 1." in text(chrome, "#spoken")
    assert text(chrome, "#lines-note").startswith("at ")
    before = pixels(chrome)
    chrome.press("+")
    assert not chrome.run("document.getElementById('reset').hidden") and pixels(chrome) != before
    chrome.press("0")
    assert chrome.run("document.getElementById('reset').hidden") and pixels(chrome) == before
    chrome.run("document.querySelector('#values summary').focus()")
    chrome.press("Enter")
    until_rows(chrome, "points", 11)
    assert rows(chrome, "points")[-1] == ["400", "1.1020"]
    # Everything that takes input has a name, and every table a caption.
    fields = "[...document.querySelectorAll('input, select, button')]"
    unnamed = f"{fields}.filter((one) => !one.labels?.length && !one.ariaLabel && !one.textContent)"
    assert chrome.run(f"{unnamed}.length") == 0
    assert chrome.run("[...document.querySelectorAll('table')].filter((t) => t.rows.length && !t.caption).length") == 0


def test_a_study_has_its_tables_and_curves(chrome: Chrome, out: Path, url: str) -> None:
    write_rows(out / "lab" / "grid" / "cells.jsonl", [{"budget": 1e9, "size": "1", "seed": 0, "bpb": 1.5}])
    open_board(chrome, url)
    choose(chrome, "study", "night")
    chrome.wait("!document.getElementById('study-card').hidden")
    until_rows(chrome, "lines", 2)
    [verdict] = rows(chrome, "verdicts")
    assert verdict == ["idea", "steps", "3", "−0.1250", "[−0.2500, ∞]", "", "better, small"]
    assert chrome.run("document.querySelectorAll('#verdicts svg').length") == 1
    shown = "document.getElementById('verdicts').offsetParent !== null"
    assert chrome.run(shown)
    choose(chrome, "study", "grid")
    chrome.wait("document.getElementById('study-heading').textContent === 'IsoFLOP grid: grid'")
    assert not chrome.run(shown), "an IsoFLOP grid has no verdicts"
    choose(chrome, "study", "night")
    chrome.wait(shown)
    until_rows(chrome, "lines", 2)
    assert [row[:2] for row in rows(chrome, "lines")] == [["gpt", "3"], ["idea", "3"]]
    for arm in ("gpt", "idea"):
        chrome.run(f"document.querySelector('[aria-label=\"Select {arm} seed 0\"]').click()")
    assert rows(chrome, "diff") == [["arm", "gpt", "idea"], ["optim.lr", "0.1", "0.2"]]
    choose(chrome, "study", "")
    chrome.wait("document.getElementById('study-card').hidden")
    until_rows(chrome, "runs", 6)


def test_rungs_of_a_ladder_are_never_averaged(chrome: Chrome, out: Path, url: str) -> None:
    path = out / "lab" / "night" / "trials.jsonl"
    trials = [json.loads(line) | {"rung": 0} for line in path.read_text(encoding="utf-8").splitlines()]
    write_rows(path, [*trials, *(one | {"rung": 1, "bpb": 1.0} for one in trials if one["recipe"] == "gpt")])
    open_board(chrome, url)
    choose(chrome, "study", "night")
    until_rows(chrome, "lines", 3)
    expected = ["gpt · rung 0", "gpt · rung 1", "idea · rung 0"]
    assert [row[:2] for row in rows(chrome, "lines")] == [[name, "3"] for name in expected]
    choose(chrome, "group", "")
    until_rows(chrome, "lines", 8)
    chrome.run("document.getElementById('live').click(), document.getElementById('live').click()")  # asks again
    names = [row[0] for row in rows(chrome, "lines")]
    assert len({*names}) == 8 == len(names) and "gpt seed 0, rung 1" in names


def test_a_bookmark_of_a_study_that_was_removed_shows_the_runs(chrome: Chrome, url: str) -> None:
    open_board(chrome, url, "#study=gone&group=arm")
    assert chrome.run("document.getElementById('study').value") == "" and len(rows(chrome, "runs")) == 6
    assert chrome.run("document.getElementById('problem').hidden && !location.hash.includes('study')")
    chrome.problems[:] = [one for one in chrome.problems if "404" not in one]


def test_a_folder_of_studies_alone_opens_with_the_first(chrome: Chrome, out: Path, url: str) -> None:
    shutil.rmtree(out / "runs")
    open_board(chrome, url)
    until_rows(chrome, "lines", 2)
    assert chrome.run("document.getElementById('study').value") == "night"
    assert [row[:2] for row in rows(chrome, "lines")] == [["gpt", "3"], ["idea", "3"]]
    choose(chrome, "study", "")  # stays chosen, although there are no runs
    chrome.wait("document.getElementById('study-card').hidden")


def test_themes(chrome: Chrome, url: str, tmp_path: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    open_board(chrome, url)
    pictures, grounds = {}, {}
    for dark in (False, True):
        for width, height in ((1400, 1000), (390, 900)):
            path = tmp_path / f"{'dark' if dark else 'light'}-{width}.png"
            chrome.screenshot(path, width=width, height=height, dark=dark)
            assert chrome.run("document.documentElement.scrollWidth <= window.innerWidth"), f"wider than {width} pixels"
            pictures[dark], grounds[dark] = path.read_bytes(), chrome.run(ground)
    assert grounds[True] != grounds[False] and pictures[True] != pictures[False]
    choose(chrome, "theme", "light", "change")
    assert chrome.run(ground) == grounds[False], "the switch goes before the system's setting"
    open_board(chrome, url)
    assert chrome.run(ground) == grounds[False], "the switch was forgotten"
    chrome.run("localStorage.clear()")
    chrome.screenshot(tmp_path / "last.png", width=1400, height=1000)


def test_a_live_run_grows(chrome: Chrome, out: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = shutil.copytree(WEB, out / "web") / "board.js"
    script.write_text(script.read_text("utf-8").replace("POLL_SECONDS = 2,", "POLL_SECONDS = 0.2,"), "utf-8")
    monkeypatch.setattr("quern.lab.board.server.WEB", out / "web")
    folder = write_run(out, "live", steps=100, done=False)
    open_board(chrome, url, "#y=loss&filter=live")
    chrome.wait("document.querySelector('#runs .running') !== null")
    assert [row[1] for row in rows(chrome, "lines")] == [f"{2 + 5 / 10 + 0.002:.4f}"]
    before = pixels(chrome)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(400, 0.02))
    chrome.wait(f"document.querySelector('#lines tbody td').textContent === '{2 + 5 / 20 + 0.002:.4f}'")
    assert rows(chrome, "runs")[0][5] == "400 / 400" and pixels(chrome) != before
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "finish", "step": 400}) + "\n")
    chrome.wait("document.querySelector('#runs .finished') !== null")
    # A new run appears by itself; with Live off nothing changes.
    write_run(out, "live-2", steps=50, done=False)
    until_rows(chrome, "runs", 2)
    chrome.run("document.getElementById('live').click()")
    assert chrome.run("document.getElementById('live').ariaPressed") == "false"
    chrome.run("new Promise((done) => setTimeout(() => done(1), 300))")  # an update that was under way
    write_run(out, "live-3", steps=50, done=False)
    time.sleep(0.8)
    assert len(rows(chrome, "runs")) == 2


def test_hostile_text_is_only_ever_text(chrome: Chrome, out: Path, url: str) -> None:
    folder = write_run(out, PAYLOAD.replace("/", "-"))
    recipe: dict[str, Any] = {"seed": 9, PAYLOAD: PAYLOAD, "optim": {"matrix_lr": PAYLOAD}}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 410, "tokens": 1, PAYLOAD: 3.0}) + "\n")
    hostile = dict.fromkeys(("idea", "verdict", "n"), PAYLOAD)
    (out / "lab" / "night" / "verdicts.json").write_text(json.dumps([hostile]))
    open_board(chrome, url, "#group=optim.matrix_lr")
    chrome.run("document.querySelectorAll('#runs input').forEach((box, index) => index < 2 && box.click())")
    told = chrome.run("[...document.querySelectorAll('#runs button.link')].map((one) => one.title)")
    command = [*"quern serve --run".split(), folder.parent.name, "--out", str(out)]
    assert command in [shlex.split(one.partition(": ")[2]) for one in told]
    assert PAYLOAD in [row[0] for row in rows(chrome, "lines")] and len(rows(chrome, "diff")) >= 2
    choose(chrome, "y", PAYLOAD)
    chrome.wait("document.getElementById('plot-heading').textContent.startsWith('<img')")
    choose(chrome, "group", PAYLOAD)
    choose(chrome, "study", "night")
    until_rows(chrome, "verdicts", 1)
    assert rows(chrome, "verdicts")[0][0] == PAYLOAD
    assert chrome.run("document.querySelectorAll('img, iframe, body script:not([src])').length") == 0
    assert chrome.run("typeof window.pwned") == "undefined"


def test_an_empty_folder_says_so_and_a_stopped_server_is_reported(chrome: Chrome, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from quern.lab.board.server import BoardOptions, run;"
        "sys.exit(run(BoardOptions(Path(sys.argv[1]), port=0), lambda line: print(line, flush=True)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        [found] = re.findall(r"http://\S+", server.stdout.readline())
        chrome.open(found)
        chrome.wait("document.querySelector('#plot .empty')?.textContent.startsWith('There are no runs') ?? false")
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0 and server.stdout.read() == "stopped\n"
    chrome.wait("!document.getElementById('problem').hidden")
    assert "does not answer" in text(chrome, "#problem")
    chrome.open("about:blank")
    assert chrome.problems and all("net::ERR" in problem for problem in chrome.problems)
    chrome.problems.clear()
