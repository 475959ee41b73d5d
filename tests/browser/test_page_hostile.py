"""Text of a user, a model, a server and a file is only ever text on the chat page."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from quern.generate.reply import Delta
from quern.serve.routes import Welcome
from tests.browser.chrome import Chrome
from tests.browser.parrot import Page, make_parrot, visiting
from tests.browser.test_page_kept import import_file

RUN = "window.pwned=1"
TAGS = (
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<svg onload={RUN}>",
    f"<math><mtext></form><form><mglyph><style></math><img src onerror={RUN}>",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>",
    f"<details open ontoggle={RUN}>x</details>",
    f"<select autofocus onfocus={RUN}></select>",
    f"<a href='javascript:{RUN}'>x</a>",
    f"<style>@import 'javascript:{RUN}';</style>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<base href=//evil.example/>",
    f"<!--><img src=x onerror={RUN}>-->",
    f"</div></article></main><script>{RUN}</script>",
    f"&lt;script&gt;{RUN}&lt;/script&gt;",
    f"\\u003cimg src=x onerror={RUN}\\u003e",
    f"<custom-tag autofocus tabindex=1 onfocus={RUN}>x</custom-tag>",
    "<form id=messages><input name=replaceChildren></form>",
    "<img name=getElementById><a id=defaultView></a>",
)
MARKDOWN = (
    f"[x](javascript:{RUN})",
    f"[x](java&#x0A;script:{RUN})",
    f"[x](&#106;avascript:{RUN})",
    f"[x](data:text/html,<script>{RUN}</script>)",
    "[x](//evil.example/)",
    f"[x](https://a.example/ '\"onmouseover={RUN} x')",
    f"[x]: javascript:{RUN}\n\n[x]",
    "![x](https://evil.example/pixel.png)",
    f"```<img/src=x/onerror={RUN}>\nx\n```",
    f'```x"onmouseover={RUN}\n</code></pre><script>{RUN}</script>\n```',
    f"| <img src=x onerror={RUN}> |\n|---|\n| <script>{RUN}</script> |",
    f"# <svg onload={RUN}>",
    f"$\\href{{javascript:{RUN}}}{{x}}$",
    f'$\\includegraphics{{x" onerror={RUN}}}$',
    f'$\\class{{x" onmouseover="{RUN}}}{{y}}$ $\\id{{messages}}{{y}}$ $\\data{{a=b}}{{y}}$ $\\style{{color:red}}{{y}}$',
    f"$\\text{{<img src=x onerror={RUN}>}}$",
    "$\\def\\a{\\a\\a}\\a$",
    '$$\\color{"onmouseover=x}y$$',
)
PAYLOADS = (*TAGS, *MARKDOWN, '&lt;b&gt; &amp; "quotes" `ticks` ${1+1} {{7*7}}')

# Whatever of the page's own markup could not be: counted in what users, models and files have written.
STRANGE = (
    "script, style, link, meta, base, iframe, object, embed, img, video, audio, source, form, input, select, textarea, "
    "template, marquee, noscript, x, custom-tag, [srcdoc], [style*=url], [id=dmp], [name]"
)
CHECK = f"""(() => {{
  const places = '#messages .body, #conversations, #title, #model, #suggestions, #problem, #token-card';
  const boxes = [...document.querySelectorAll(places)];
  const all = boxes.flatMap((box) => [...box.querySelectorAll('*')]);
  return {{
    strange: all.filter((node) => node.matches({json.dumps(STRANGE)})).map((node) => node.outerHTML),
    handlers: all.flatMap((node) => [...node.attributes].map((one) => one.name).filter((it) => it.startsWith('on'))),
    links: all.filter((node) => node.hasAttribute('href') && node.localName !== 'use')
      .map((node) => node.getAttribute('href')).filter((href) => !/^https?:\\/\\//.test(href)),
    pwned: typeof window.pwned,
  }};
}})()"""
CLEAN = {"strange": [], "handlers": [], "links": [], "pwned": "undefined"}


def poke(page: Page) -> None:
    """Moves the focus and the pointer over everything, for the handlers that wait for it."""
    page.run(
        "for (const node of document.querySelectorAll('#messages .body *')) "
        "for (const name of ['mouseover', 'mouseenter', 'focus', 'click', 'animationstart', 'toggle']) "
        "if (node.localName !== 'button' && node.localName !== 'a') node.dispatchEvent(new Event(name))"
    )


def test_payloads_from_everywhere_on_one_page(browser: Chrome, tmp_path: Path) -> None:
    engine, name = make_parrot(context=16384), "</select><img src=x onerror=window.pwned=1>"
    pieces = ((payload + "\n\n", Delta("tool", payload), Delta("output", payload)) for payload in PAYLOADS)
    engine.will_say(*chain.from_iterable(pieces))
    with visiting(browser, {name: engine}, welcome=Welcome({name: PAYLOADS[:6]})) as page:
        assert page.texts("#model option") == [name] and page.texts("#suggestions button") == list(PAYLOADS[:6])
        page.ask("\n".join(PAYLOADS))
        assert page.texts(".user .body") == ["\n".join(PAYLOADS)]
        assert page.texts(".call dd:nth-of-type(2)") == list(PAYLOADS)
        poke(page)
        assert page.run(CHECK) == CLEAN
        # Every payload of tags is read on the page as it was written.
        shown = page.run("document.querySelector('.assistant').innerText")
        flat = "".join(shown.split())
        for payload in TAGS:
            if "&" not in payload and "\\" not in payload:
                assert "".join(payload.split()) in flat, payload
        page.run("for (const call of document.querySelectorAll('.call')) call.open = true")
        # The same as tokens, as a title, and from a file.
        page.click("#xray")
        page.wait("document.querySelectorAll('.token').length > 100")
        page.run("document.querySelectorAll('.text .token')[3].click()")
        assert page.run(CHECK) == CLEAN
        page.press("Escape")
        page.click("#xray")
        page.run("document.querySelector('#conversations .item-buttons button').click()")
        browser.type(PAYLOADS[0] + PAYLOADS[1])
        page.press("Enter")
        page.wait("document.getElementById('title').textContent.includes('pwned')")
        nodes: dict[str, Any] = {
            "a": {"parent": None, "role": "user", "parts": [{"type": "text", "text": PAYLOADS[1]}]},
            "b": {
                "parent": "a",
                "role": "assistant",
                "finish": PAYLOADS[1],
                "parts": [{"type": "text", "text": payload + "\n\n"} for payload in PAYLOADS],
            },
        }
        one = {"title": "".join(PAYLOADS[:2]), "mode": PAYLOADS[1], "system": PAYLOADS[1], "nodes": nodes, "leaf": "b"}
        text = json.dumps({"format": "quern-conversations", "version": 1, "conversations": [one]})
        import_file(page, tmp_path / "hostile.json", text)
        page.wait("document.querySelectorAll('#conversations .open').length === 2")
        poke(page)
        assert page.run(CHECK) == CLEAN
        page.run("new Promise((done) => setTimeout(() => done(1), 200))")
        assert page.run("typeof window.pwned") == "undefined"


def test_an_error_of_the_server_is_text(page: Page) -> None:
    page.run(
        "window.fetch = async () => new Response("
        "JSON.stringify({error: {message: '<img src=x onerror=window.pwned=1>'}}), {status: 500}); 0"
    )
    page.send("x")
    assert page.problem() == "<img src=x onerror=window.pwned=1>"
    assert page.run(CHECK) == CLEAN
