"""The chat page keeps conversations over a reload, their titles, search, files, and the branches of a tree."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from quern.serve.routes import Welcome
from tests.browser.chrome import Chrome
from tests.browser.parrot import DONE, READY, Page, make_parrot, visiting

# What a download would be written to a folder is taken from the page instead.
CATCH_DOWNLOAD = "URL.createObjectURL = (blob) => { window.saved = blob.text(); return 'blob:none'; }"


def titles(page: Page) -> list[str]:
    return page.texts("#conversations .open")


def exported(page: Page, button: str) -> dict[str, Any]:
    page.run(CATCH_DOWNLOAD + "; HTMLAnchorElement.prototype.click = () => {}; delete window.saved")
    page.click(button)
    page.wait("window.saved !== undefined")
    return json.loads(page.run("window.saved"))


def import_file(page: Page, path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    found = page.chrome.send("Runtime.evaluate", expression="document.getElementById('file')")
    page.chrome.send("DOM.setFileInputFiles", files=[str(path)], objectId=found["result"]["objectId"])


def test_conversations_are_kept_renamed_searched_and_deleted(page: Page) -> None:
    for question, answer in (("What does the miller do?", "He grinds rye."), ("Where is the bakery?", "In the lane.")):
        page.click("#new")
        page.ask(question, answer)
    page.open(fresh=False)
    assert titles(page) == ["Where is the bakery?", "What does the miller do?"]
    page.click("#conversations .open", 1)
    assert page.said() == ["What does the miller do?", "He grinds rye."]
    assert page.run("document.title") == "What does the miller do? – quern"
    page.click("[aria-label='Rename What does the miller do?']")
    page.chrome.type("The mill")
    page.press("Enter")
    page.wait("document.getElementById('title').textContent === 'The mill'")
    found = {"RYE grinds": ["The mill"], "mill": ["The mill"], "lane": ["Where is the bakery?"], "x": []}
    for query, expected in found.items():
        page.type("#search", query)
        page.wait(f"document.querySelectorAll('#conversations .open').length === {len(expected)}")
        assert titles(page) == expected
    assert "Nothing found" in page.texts("#conversations")[0]
    page.press("Escape")
    page.open(fresh=False)
    assert sorted(titles(page)) == ["The mill", "Where is the bakery?"]
    page.click("[aria-label='Delete The mill']")
    page.wait("document.querySelectorAll('#conversations .open').length === 1")
    page.open(fresh=False)
    assert titles(page) == ["Where is the bakery?"]
    page.click("[aria-label='Delete Where is the bakery?']")
    page.click("#toast button")
    page.wait("document.querySelectorAll('.message').length === 2")
    page.open(fresh=False)
    assert titles(page) == ["Where is the bakery?"]


def test_names_do_not_end_with_half_a_character(page: Page) -> None:
    text = "n" * 56 + "\N{WAVING HAND SIGN}" * 9
    page.ask(text)
    assert titles(page) == [f"{text[:56]}…"]
    page.run("window.names = []; HTMLAnchorElement.prototype.click = function () { names.push(this.download) }")
    page.click("[aria-label^='Rename']")
    page.chrome.type("n" * 39 + "\N{DESERET CAPITAL LETTER LONG I}n")
    page.press("Enter")
    page.click("[aria-label^='Export']")
    page.wait("names.length === 1")
    assert page.run("names") == [f"quern-{'n' * 39}.json"]


def test_the_chosen_model_outlives_a_reload(browser: Chrome) -> None:
    steps = "#new one text", "#new other chat", "[value=text] other text", "[value=chat] one chat", "#new other chat"
    welcome = Welcome({"one": ["Once"], "other": ["Why?"]}, completes=["one"])
    with visiting(browser, {"one": make_parrot(), "other": make_parrot()}, welcome=welcome) as page:
        for button, model, mode in map(str.split, steps):
            page.click(button)
            page.run(f"Object.assign(document.getElementById('model'), {{value: '{model}'}}).onchange()")
            assert page.run("document.body.dataset.mode") == mode, "that of the model, unless the user chooses one"
            assert page.texts("#suggestions button") == list(welcome.suggestions[model])
        page.ask("first")
        assert page.texts(".stats")[0].startswith("other · "), "which model it was"
        page.open(fresh=False)
        assert page.run("document.getElementById('model').value") == "other"


def test_a_question_outlives_a_tab_that_is_closed_during_the_reply(page: Page) -> None:
    page.begin("Are you there?", "never " * 400, seconds=0.05)
    page.reopen()
    assert page.said() == ["Are you there?"]
    page.click("#problem button", reply="Yes.")
    page.until_said("Are you there?", "Yes.")


def test_edits_and_other_tries_are_branches(page: Page) -> None:
    engine = page.engine
    page.ask("first", "one")
    page.ask("second", "two")
    page.click(".message:nth-child(4) [aria-label='Try again']", reply="another two")
    page.until_said("first", "one", "second", "another two")
    asked = engine.tokenizer.decode(engine.asked[-1][0][0])
    assert "one" in asked and "second" in asked and "two" not in asked
    # An edited first message has a branch of its own; the other one keeps its replies.
    page.click(".message:nth-child(1) [aria-label='Edit']", reply="changed")
    page.type(".edit textarea", "edited")
    page.press("Enter")
    page.until_said("edited", "changed")
    assert titles(page) == ["edited"]
    assert "first" not in engine.tokenizer.decode(engine.asked[-1][0][0])
    page.click(".message:nth-child(1) [aria-label='Previous version']")
    assert page.said() == ["first", "one", "second", "another two"] and titles(page) == ["first"]
    page.click(".message:nth-child(4) [aria-label='Previous version']")
    assert page.said() == ["first", "one", "second", "two"]
    assert page.texts(".message:nth-child(4) .walk span") == ["1 / 2"]
    page.reopen()
    assert page.said() == ["first", "one", "second", "two"]
    page.click(".message:nth-child(1) [aria-label='Next version']")
    assert page.said() == ["edited", "changed"]
    # With the keyboard: the arrow up edits the last message, Escape leaves it as it was.
    page.run("document.getElementById('input').focus()")
    page.press("ArrowUp")
    assert page.run("document.activeElement.value") == "edited"
    page.press("Escape")
    assert page.said() == ["edited", "changed"] and page.count(".edit") == 0
    assert page.run("document.activeElement.closest('.user .bar-line') && document.activeElement.title") == "Edit"


def test_another_try_that_fails_shows_what_was_shown_before(page: Page) -> None:
    """Not the last version, and the messages behind it stay."""
    for answer in ("one", "two"):
        page.ask(f"{answer}?", answer)
    page.click(".message:nth-child(2) [aria-label='Try again']", reply="another one")
    page.wait(f"document.querySelectorAll('.message').length === 2 && {DONE}")
    page.click(".message:nth-child(2) [aria-label='Previous version']")
    page.engine.will_say(failure=RuntimeError("no"))
    for button in (".message:nth-child(2) [aria-label='Try again']", "#problem button"):
        page.run("document.getElementById('problem').hidden = true")
        page.click(button)
        page.problem()
        assert page.said() == ["one?", "one", "two?", "two"]
        assert page.texts("#problem span") == ["The server failed on this request."]


def test_an_open_edit_outlives_what_else_happens(page: Page) -> None:
    page.ask("first")
    page.begin("second", "word " * 200, seconds=0.02)
    page.click(".message:nth-child(1) [aria-label='Edit']")
    page.type(".edit textarea", "half an edit")
    page.press("Escape")  # of the field: the edit is given up, the reply goes on
    page.click(".message:nth-child(1) [aria-label='Edit']")
    page.type(".edit textarea", "half an edit")
    page.press("Enter")
    assert "wait for its end" in page.texts("#toast")[0]
    page.click("#stop")
    page.wait(DONE)
    page.press("x", ctrl=True, shift=True)
    page.wait("document.querySelectorAll('.text .token').length > 0")
    page.press("x", ctrl=True, shift=True)
    page.wait("document.querySelectorAll('.text .token').length === 0")
    assert page.run("document.querySelector('.edit textarea')?.value") == "half an edit"
    assert page.count(".message:nth-child(1) .bar-line button") == 0, "the buttons are the editor's own"
    page.engine.will_say("changed")
    page.run("document.querySelector('.edit textarea').focus()")
    page.press("Enter")
    page.until_said("half an edit", "changed")
    page.run("document.getElementById('input').focus()")
    page.press("ArrowUp")
    page.type(".edit textarea", "more")
    page.run("document.getElementById('input').focus()")
    page.press("ArrowUp")  # goes back to the field
    assert page.run("document.activeElement.value") == "more"


def test_a_file_brings_everything_back(page: Page, tmp_path: Path) -> None:
    page.ask("How much?", "The grain, 12 sacks.")
    page.click("[aria-label='Try again']", reply="Twelve sacks.")
    page.until_said("How much?", "Twelve sacks.")
    data = exported(page, "#export")
    [conversation] = data["conversations"]
    assert data["format"] == "quern-conversations" and len(conversation["nodes"]) == 3
    assert sum(len(tokens) for tokens in conversation["tokens"].values()) > 4
    page.open()
    assert titles(page) == []
    import_file(page, tmp_path / "export.json", json.dumps(data))
    page.wait("document.querySelectorAll('.message').length === 2")
    assert page.said() == ["How much?", "Twelve sacks."] and titles(page) == ["How much?"]
    page.click("#xray")
    page.wait("document.querySelectorAll('.text .token').length > 1")
    again = exported(page, "#export")["conversations"][0]
    assert {**again, "id": 0} == {**conversation, "id": 0}


def test_damaged_files_are_refused_and_change_nothing(page: Page, tmp_path: Path) -> None:
    page.ask("keep me")
    good = exported(page, "#export")
    node_id = next(iter(good["conversations"][0]["nodes"]))

    def changed(**fields: Any) -> str:
        made = json.loads(json.dumps(good))
        for name, value in fields.items():
            target = made["conversations"][0]
            if name in ("parent", "role", "parts"):
                target = target["nodes"][node_id]
            target[name] = value
        return json.dumps(made)

    ids = list(good["conversations"][0]["nodes"])
    damaged = {
        "not JSON": "{",
        "another format": json.dumps({"format": "chats", "conversations": []}),
        "a later version": json.dumps({**good, "version": 2}),
        "no list": json.dumps({**good, "conversations": {"a": 1}}),
        "no nodes": changed(nodes=[]),
        "a strange role": changed(role="system"),
        "a strange part": changed(parts=[{"type": "html", "text": "x"}]),
        "a missing parent": changed(parent="beef"),
        "a loop": changed(parent=ids[1]),
        "a strange token": changed(tokens={ids[1]: [{"text": 1, "id": 0, "logprob": 0, "bytes": [], "top": []}]}),
    }
    for name, text in damaged.items():
        page.run("document.getElementById('problem').hidden = true")
        import_file(page, tmp_path / "damaged.json", text)
        page.problem()
        assert titles(page) == ["keep me"], name
    assert page.run("({}).polluted") is None
    # Fields that the page does not know are left out; ids that every object has are like others.
    strange = json.loads(changed(script="x", title="<b>t</b>\n2"))
    strange["conversations"][0]["__proto__"] = {"polluted": 1}
    import_file(page, tmp_path / "strange.json", json.dumps(strange))
    page.wait("document.querySelectorAll('#conversations .open').length === 2")
    assert "<b>t</b> 2" in titles(page) and page.run("({}).polluted") is None
    assert "script" not in exported(page, "#export")["conversations"][1]


def test_a_title_is_typed_to_its_end_when_a_reply_ends_meanwhile(page: Page) -> None:
    page.begin("first", "word " * 20, seconds=0.05)
    page.click("[aria-label='Rename first']")
    page.chrome.type("A title")
    page.wait(DONE)
    page.chrome.type(" of mine")
    page.press("Enter")
    assert titles(page) == ["A title of mine"]
    assert page.run("document.activeElement.textContent") == "A title of mine"


def test_the_focus_stays_on_its_button_when_a_reply_ends(page: Page) -> None:
    page.ask("first")
    for button in ("Export first", "Copy"):
        page.begin("more", "word " * 20, seconds=0.02)
        page.run(f"[...document.querySelectorAll('[aria-label={json.dumps(button)}]')].at(-1).focus()")
        page.wait(DONE)
        assert page.run("document.activeElement.ariaLabel") == button


def in_another_tab(page: Page, id: str, change: str) -> None:
    """The other tab is played by its two effects: a change of `store`, and a word on the channel."""
    page.run(
        "new Promise((done) => { indexedDB.open('quern').onsuccess = ({target}) => {"
        " const transaction = target.result.transaction('conversations', 'readwrite');"
        f" const store = transaction.objectStore('conversations'); {change};"
        f" transaction.oncomplete = () => {{ new BroadcastChannel('quern').postMessage('{id}'); done(1); }}; }}; }})"
    )


def test_a_name_that_another_tab_gives_stays(page: Page) -> None:
    page.ask("first")
    id = page.run("document.querySelector('#conversations .chosen').dataset.id")
    named = "{title: 'Theirs', named: true, system: 'Be brief.'}"
    change = f"({{target}}) => store.put(Object.assign(target.result, {named}))"
    in_another_tab(page, id, f"store.get('{id}').onsuccess = {change}")
    page.ask("mine")
    assert titles(page) == ["Theirs"]
    page.reopen()
    page.click("#settings-open")
    assert titles(page) == ["Theirs"] and page.run("document.getElementById('system').value") == "Be brief."


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_what_another_tab_adds_to_the_open_conversation_stays(page: Page, late: bool) -> None:
    """In the order of the messages' times, whether it is told before or after the page's own message."""
    page.ask("first")
    id = page.run("document.querySelector('#conversations .chosen').dataset.id")
    leaf = page.run("document.querySelector('.message:last-child').dataset.node")
    added = ", ".join(
        f"{id}: {{id: '{id}', parent: '{parent}', role: '{role}', parts: {parts}, time: 1, pick: null}}"
        for id, parent, role, parts in (
            ("aa", leaf, "user", "[{type: 'text', text: 'theirs'}]"),
            ("bb", "aa", "assistant", "[]"),  # the reply has not begun
        )
    )
    change = f"({{target}}) => {{ Object.assign(target.result.nodes, {{{added}}}); store.put(target.result); }}"
    if late:
        page.ask("mine")
    in_another_tab(page, id, f"store.get('{id}').onsuccess = {change}")
    assert page.said() == ["first", "fine", *["mine", "fine"] * late]
    if not late:
        page.ask("mine")
    page.reopen()
    assert page.said() == ["first", "fine", "mine", "fine"]
    page.click("[aria-label='Previous version']")
    assert page.said() == ["first", "fine", "theirs"]


def test_a_reply_that_another_tab_writes_is_shown_and_kept_once_it_has_ended(page: Page) -> None:
    def told(parts: str) -> str:
        asked = "[{type: 'text', text: 'theirs'}]"
        question = f"{{id: 'aa', parent: null, role: 'user', parts: {asked}, time: 1, pick: 'bb'}}"
        reply = f"{{id: 'bb', parent: 'aa', role: 'assistant', parts: {parts}, time: 2, pick: null}}"
        own = "id: 'cc', title: '', named: false, mode: 'chat', system: '', created: 1, updated: 1, leaf: 'bb'"
        return f"store.put({{{own}, nodes: {{aa: {question}, bb: {reply}}}}})"

    in_another_tab(page, "cc", told("[]"))
    page.click("#conversations .open")
    assert page.said() == ["theirs", ""]
    page.ask("mine")
    in_another_tab(page, "cc", told("[{type: 'text', text: 'their reply'}]"))
    page.wait("document.querySelector('.assistant .body').textContent.trim() === 'their reply'")
    page.ask("mine too")
    page.reopen()
    assert page.said() == ["theirs", "their reply", "mine", "fine", "mine too", "fine"]


def test_a_file_that_is_too_large_for_the_storage_says_so(page: Page, tmp_path: Path) -> None:
    """What there was room for is in the list, and is kept. A browser's own error has no message."""
    page.ask("first")
    data = exported(page, "#export")
    full = "if (++puts > 2) throw new DOMException('', 'QuotaExceededError'); return put.apply(this, values)"
    proto = "IDBObjectStore.prototype"
    page.run(
        f"(() => {{ let puts = 0; const {{ put }} = {proto}; {proto}.put = function (...values) {{ {full} }} }})()"
    )
    import_file(page, tmp_path / "large.json", json.dumps({**data, "conversations": [*data["conversations"]] * 4}))
    assert "storage for this page is full: export" in page.problem()
    there = titles(page)
    page.ask("more")
    assert "could not keep the conversation: The storage" in page.texts("#toast")[0]
    page.open(fresh=False)
    assert titles(page) == there == ["first"] * 2


def test_all_of_a_conversation_is_printed(page: Page) -> None:
    for _ in range(2):
        page.ask("Go on.", "The miller grinds.\n\n" * 22)
    printed = base64.b64decode(page.chrome.send("Page.printToPDF")["data"])
    assert len(re.findall(rb"/Type /Page\b", printed)) > 1


def test_what_another_tab_sets_holds_here_too(page: Page) -> None:
    other = {"temperature": 0.2, "theme": "dark"}
    page.run("document.body.append(document.createElement('iframe'))")  # like a tab, it has a window of its own
    page.run(f"document.querySelector('iframe').contentWindow.localStorage['quern-settings'] = '{json.dumps(other)}'")
    page.wait("document.documentElement.dataset.theme === 'dark'")
    page.set("top_k", "7")
    assert json.loads(page.run("localStorage['quern-settings']")) == {**other, "top_k": 7}
    assert page.run("document.getElementById('set-temperature').value") == "0.2"


def test_a_reply_that_the_browser_cannot_keep_is_shown(page: Page) -> None:
    page.run("IDBObjectStore.prototype.put = function () { throw new DOMException('The disk is full') }")
    page.ask("first")
    assert page.said() == ["first", "fine"]
    assert "could not keep the conversation: The disk is full" in page.texts("#toast")[0]


def test_the_link_with_a_key_leaves_what_the_user_has_cleared(page: Page) -> None:
    page.set("temperature", "")
    page.chrome.open("about:blank")
    page.chrome.open(f"{page.url}/#key=secret")
    for _ in range(2):
        page.wait(READY)
        assert page.run("document.getElementById('set-temperature').value") == ""
        page.open(fresh=False)
    page.run("document.getElementById('settings-reset').click()")
    assert page.run("localStorage.getItem('quern-settings')") == "{}"


def test_a_browser_that_keeps_nothing_shows_the_page(shared_page: Page, tmp_path: Path) -> None:
    """Chromium with cookies switched off, as users do: storage then raises an error where it is only named."""
    (tmp_path / "Default").mkdir()
    off = {"profile": {"default_content_setting_values": {"cookies": 2}}}
    (tmp_path / "Default" / "Preferences").write_text(json.dumps(off), encoding="utf-8")
    chrome = Chrome(tmp_path)
    try:
        page = Page(chrome, shared_page.url, shared_page.engine)
        page.engine.will_say("fine")
        page.open()
        assert "keeps no data" in page.texts("#toast")[0]
        page.ask("first")
        assert page.said() == ["first", "fine"] and chrome.problems == []
    finally:
        chrome.close()
