"""Token x-ray in a real browser: colours against the engine's own numbers, the card, branches, prompts, completions."""

import math
from typing import Any

from quern.generate.engine import Engine
from quern.generate.reply import Delta, Token
from quern.generate.sampling import Sampling
from quern.text.chat import render_prompt
from quern.text.tokenizer import Tokenizer
from tests.browser.chrome import Chrome
from tests.browser.parrot import DONE, LOGPROB, Page, Parrot, alternatives, make_parrot, visiting
from tests.support.toy_engine import CPU, SENTENCES, toy_engine, toy_model

REPLY = "The miller grinds the grain"
CLASSES = "[...document.querySelectorAll('{}')].map((span) => span.className.replace('token ', ''))"
FACTS = (
    "Object.fromEntries([...document.querySelectorAll('#token-card dt')]"
    ".map((name) => [name.textContent, name.nextElementSibling.textContent]))"
)


def classes(page: Page, selector: str) -> list[str]:
    return page.run(CLASSES.format(selector))


def measure(page: Page, name: str) -> None:
    page.run(f"document.getElementById('measure').value = '{name}'")
    page.run("document.getElementById('measure').dispatchEvent(new Event('change'))")


def first_at_most(bounds: list[float], value: float) -> int:
    return next((place for place, bound in enumerate(bounds) if value <= bound), 5)


def sharp_engine() -> Engine:
    """A random model whose probabilities are far apart."""
    engine = toy_engine(context=256)
    plain = engine.model.logits
    engine.model.logits = lambda x_BTD: 6 * plain(x_BTD)
    return engine


def level(token: Token, name: str) -> int:
    """The class of a token's colour, from the engine's own numbers."""
    shares = [math.exp(value) for _, value in token.top]
    if name == "probability":
        assert token.logprob is not None
        return first_at_most([-0.9, -0.6, -0.3, -0.1, -0.02], -math.exp(token.logprob))
    if name == "entropy":
        bits = -sum(p * math.log2(p) for p in [*shares, 1 - sum(shares)] if p > 1e-9)
        return first_at_most([0.25, 0.75, 1.5, 2.5, 4], bits)
    place = next((n for n, (id, _) in enumerate(token.top, 1) if id == token.id), 99)
    return first_at_most([1, 2, 3, 5, 10], place)


def test_colours_are_the_engines_numbers(browser: Chrome) -> None:
    """Tokens of a prompt and of a reply, coloured three ways, against the engine that reads them both at once."""
    engine, text = sharp_engine(), "What is 123 + 456? stop there"
    ids = [engine.tokenizer.bos, *engine.tokenizer.encode(text)]
    how: dict[str, Any] = {"max_tokens": 60, "seed": 7, "sampling": Sampling(), "plain": True}
    reply = sharp_engine().generate([ids], **how)[0][0].ids
    scored = [token for part in sharp_engine().read([*ids, *reply], 20) for token in part]
    with visiting(browser, {"toy": engine}) as page:
        for name, value in (("alternatives", "20"), ("max_tokens", "60"), ("seed", "7"), ("temperature", "1")):
            page.set(name, value)
        page.click("input[value=text]")
        page.ask(text)
        page.click("#xray")
        page.open_prompt(len(ids))
        for name in ("probability", "rank", "entropy"):
            measure(page, name)
            levels = [f"level-{level(token, name)}" for token in scored]
            prompt, said = classes(page, ".prompt .token"), classes(page, ".assistant .text .token")
            assert [one.split()[0] for one in prompt] == ["unscored", *levels[: len(ids) - 1]], name
            assert len(said) > 10
            assert [one.split()[0] for one in said] == levels[len(ids) - 1 :][: len(said)], name
            assert len(set(levels)) > 3, f"{name}: the test has too few colours"
        page.click(".prompt .token", 0)
        assert page.run(FACTS)["probability"] == "none: nothing stands before it"


def test_the_card_tells_a_token_and_its_alternatives(page: Page) -> None:
    tokenizer = page.engine.tokenizer
    page.ask("go", REPLY)
    page.click("#xray")
    ids = tokenizer.encode(REPLY)
    page.wait(f"document.querySelectorAll('.text .token').length === {len(ids)}")
    assert "".join(page.texts(".text .token")) == REPLY
    # The keyboard: the last reply has the focus, arrows walk, Enter goes into the card, Escape comes back.
    page.wait("document.activeElement.matches('.text.tokens') && !document.getElementById('token-card').hidden")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.run("document.activeElement.getAttribute('aria-activedescendant')").endswith("-2")
    facts = page.run(FACTS)
    raw = tokenizer.decode_bytes([ids[2]])
    top = [math.exp(value) for _, value in alternatives(ids[2], tokenizer)]
    bits = -sum(p * math.log2(p) for p in [*top, 1 - sum(top)])
    assert facts == {
        "id": str(ids[2]),
        "bytes": " ".join(f"{byte:02X}" for byte in raw),
        "probability": f"{100 * math.exp(LOGPROB):.1f} %",
        "rank": "1",
        "entropy": f"≥ {bits:.2f} bits",
    }
    assert page.texts("#status") == [f"probability {facts['probability']}"], "a screen reader says it with the token"
    page.press("Enter")
    assert page.run("document.activeElement.className") == "alternative"
    assert page.count(".alternative") == 4 and page.count(".alternative:disabled") == 1
    page.press("Escape")
    assert page.run("document.activeElement.classList.contains('tokens')")
    assert page.run("document.getElementById('token-card').hidden")
    # The pointer.
    at = page.run("(({x, y}) => [x + 4, y + 8])(document.querySelectorAll('.text .token')[3].getBoundingClientRect())")
    page.chrome.send("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    page.wait("!document.getElementById('token-card').hidden")
    assert page.run(FACTS)["id"] == str(ids[3])
    page.chrome.send("Input.dispatchMouseEvent", type="mouseMoved", x=600, y=5)
    page.wait("document.getElementById('token-card').hidden")


def branch_at(page: Page, token: int, alternative: int, reply: str) -> None:
    before = page.count(".walk")
    page.click(".text:last-child .token", token)
    page.click(".alternative", alternative, reply)
    page.wait(f"document.querySelectorAll('.walk').length > {before} && {DONE}")


def test_an_alternative_begins_a_branch_there(page: Page) -> None:
    engine, tokenizer = page.engine, page.engine.tokenizer
    page.ask("go", REPLY)
    [[prompt]] = [asked[0] for asked in engine.asked]
    page.click("#xray")
    ids = tokenizer.encode(REPLY)
    other = alternatives(ids[3], tokenizer)[1][0]
    branch_at(page, 3, 1, " at dawn")
    [[sent], options] = engine.asked[0]
    assert sent == [*prompt, *ids[:3], other] and options["plain"]
    begun = tokenizer.decode([*ids[:3], other])
    assert "".join(page.texts(".text .token")) == begun + " at dawn"
    # The chosen token keeps the alternatives of its place, itself among them.
    page.click(".text .token", 3)
    assert page.run(FACTS)["rank"] == "2"
    page.press("Escape")
    # The end of the reply as the chosen token ends the text there, without asking the model.
    engine.will_say("never")
    branch_at_count = page.count(".walk")
    page.click(".text .token", 2)
    page.click(".alternative", 3)
    page.wait("document.querySelectorAll('.text .token').length === 2")
    assert engine.asked == [] and page.count(".walk") == branch_at_count
    assert page.texts(".walk span") == ["3 / 3"]
    # While the tokens of another branch are awaited, nothing else begins.
    page.run("window.answering = window.fetch; window.fetch = () => new Promise(() => {})")
    page.click(".text .token", 1)
    page.click(".alternative", 1)
    page.click(".message:nth-child(2) [aria-label='Try again']")
    page.wait("document.querySelector('#toast')?.textContent.includes('A branch is about to begin')")
    page.run("window.fetch = window.answering")
    page.click("#xray")
    page.wait("document.querySelectorAll('.token').length === 0")
    assert page.said()[1] == tokenizer.decode(ids[:2])


def test_a_branch_after_a_call_has_the_calls_tokens(page: Page) -> None:
    engine, tokenizer = page.engine, page.engine.tokenizer
    page.ask("2 + 3?", "Well: ", Delta("tool", "2+3"), Delta("output", "5"), "It is five")
    [[prompt]] = [asked[0] for asked in engine.asked]
    page.click("#xray")
    page.wait("document.querySelectorAll('.assistant .text.tokens').length === 2")
    ids = tokenizer.encode("It is five")
    other = alternatives(ids[1], tokenizer)[2][0]
    branch_at(page, 1, 2, "!")

    def call(kind: str, text: str) -> list[int]:
        return [tokenizer.special(f"<|{kind}_start|>"), *tokenizer.encode(text), tokenizer.special(f"<|{kind}_end|>")]

    expected = [*prompt, *tokenizer.encode("Well: "), *call("tool", "2+3"), *call("output", "5"), ids[0], other]
    assert engine.asked[0][0] == [expected]
    assert page.count(".call") == 1


def test_the_prompt_is_shown_as_it_was_read_and_its_cached_part_shaded(page: Page) -> None:
    engine = page.engine
    page.ask("one")
    engine.will_say("fine")
    engine.cached = 7
    page.ask("two")
    [[prompt]] = [asked[0] for asked in engine.asked]
    page.click("#xray")
    page.open_prompt(len(prompt), ".message:last-child")
    told = f"What the model read: {len(prompt)} tokens, 7 of them from the prompt cache"
    assert page.texts(".message:last-child .prompt summary") == [told]
    assert "".join(page.texts(".prompt .token")) == engine.tokenizer.decode(prompt)
    assert [("cached" in one) for one in classes(page, ".prompt .token")] == [n < 7 for n in range(len(prompt))]


def test_the_prompt_of_an_old_reply_has_the_system_text_of_its_time(page: Page) -> None:
    page.click("#settings-open")
    page.type("#system", "You are a miller.")
    page.press("Escape")
    page.ask("one", reason="length")
    [[prompt]] = [asked[0] for asked in page.engine.asked]
    page.click("#settings-open")
    page.type("#system", "Be brief.")
    page.press("Escape")
    go_on(page, " more")
    assert page.engine.asked[0][0][0][: len(prompt)] == prompt
    page.reopen()
    page.click("#xray")
    page.open_prompt()
    assert "".join(page.texts(".prompt .token")) == page.engine.tokenizer.decode(prompt)


def test_a_text_is_continued_and_branches_from_its_own_tokens(page: Page) -> None:
    engine, tokenizer = page.engine, page.engine.tokenizer
    page.click("input[value=text]")
    page.ask("The miller ", " grinds")
    [[sent], options] = engine.asked[0]
    assert sent == [tokenizer.bos, *tokenizer.encode("The miller ")] and options["plain"]
    page.send("", " more")
    page.wait(f"document.querySelectorAll('.message').length === 3 && {DONE}")
    assert engine.asked[0][0] == [[tokenizer.bos, *tokenizer.encode("The miller  grinds")]]
    page.click("#xray")
    page.open_prompt()
    page.click(".prompt .token", 2, reply="!")
    chosen = page.run("document.querySelector('button.alternative:not(:disabled)').title.match(/id (\\d+)/)[1]")
    page.click("button.alternative:not(:disabled)")
    page.wait(f"document.querySelectorAll('.message').length === 2 && {DONE}")
    begun = tokenizer.decode([sent[1], int(chosen)])
    assert engine.asked[0][0] == [[tokenizer.bos, *tokenizer.encode(begun)]]


def test_bytes_that_are_no_character_and_replies_without_a_record(page: Page) -> None:
    page.ask("wave", "👋🏽")
    page.click("#xray")
    page.wait("document.querySelectorAll('.text .token').length > 0")
    tokenizer = page.engine.tokenizer
    expected: list[Any] = []
    for id in tokenizer.encode("👋🏽"):
        raw = tokenizer.decode_bytes([id])
        try:
            expected.append(raw.decode())
        except UnicodeDecodeError:
            expected.append("".join(f"⟨{byte:02X}⟩" for byte in raw))
    assert page.texts(".text .token") == expected
    page.set("alternatives", "0")
    page.engine.will_say("plain", seconds=0.1, reason="length")  # it is drawn before its end
    page.ask("again")
    assert page.engine.asked[-1][1]["logprobs"] is None
    assert "No probabilities were recorded" in page.said()[-1] and "plain" in page.said()[-1]
    page.set("alternatives", "5")
    go_on(page, " more")
    page.click(".message:last-child .text .token", 0)
    assert page.run(FACTS)["probability"] == "none was recorded"


def go_on(page: Page, text: str, engine: Parrot | None = None) -> None:
    (engine or page.engine).will_say(text)
    page.click(".message:last-child .text-button")
    page.wait(f"[...document.querySelectorAll('.message')].at(-1).textContent.includes('{text.strip()}') && {DONE}")


def test_one_reply_is_written_at_a_time(page: Page) -> None:
    """A click that comes twice, or while a reply is written, begins no second reply: Stop would not reach it."""
    page.ask("go", "The miller", reason="length")
    page.engine.will_say(" grinds")
    page.run("(() => { const go = document.querySelector('.assistant .text-button'); go.click(); go.click(); })()")
    page.wait(f"document.querySelector('.assistant').textContent.includes('grinds') && {DONE}")
    assert page.texts(".walk span") == ["2 / 2"] and len(page.engine.asked) == 1
    page.click("#new")
    page.click("input[value=text]")
    page.ask("The miller ")
    page.click("#xray")
    page.open_prompt()
    page.begin("more", "word " * 20, seconds=0.05)
    page.click(".prompt .token", 2)
    page.click("button.alternative:not(:disabled)")
    page.wait(DONE)
    assert len(page.engine.asked) == 1 and page.count(".walk") == 0


def test_another_model_goes_on_with_its_own_tokens(browser: Chrome) -> None:
    first, tokenizer = make_parrot(), Tokenizer.train(SENTENCES[1:] * 8, 300)
    second = Parrot(toy_model(context=512, vocab_size=tokenizer.vocab_size), tokenizer, CPU)
    with visiting(browser, {"first": first, "second": second}) as page:
        page.ask("go", REPLY, reason="length")
        page.run("document.getElementById('model').value = 'second'")
        go_on(page, " at dawn", second)
        asked = render_prompt(tokenizer, [{"role": "user", "content": "go"}])
        assert tokenizer.encode(REPLY) != first.tokenizer.encode(REPLY)
        assert second.asked[0][0] == [[*asked, *tokenizer.encode(REPLY)]]
        page.click("#xray")
        page.wait("document.querySelectorAll('.text .token').length > 1")
        assert "".join(page.texts(".text .token")) == REPLY + " at dawn"


def test_the_prompt_of_a_text_that_is_too_long_is_shown_as_it_was_read(page: Page) -> None:
    engine, long = page.engine, "stop there, " * 200
    page.click("input[value=text]")
    page.ask(long, "please", reason="length")
    [[sent], _] = engine.asked[0]
    left_out = len(engine.tokenizer.encode(long)) + 1 - len(sent)
    assert left_out > 0 and f"the first {left_out} tokens were left out" in page.said()[1]
    go_on(page, " now")
    assert engine.asked[0][0] == [[*sent, *engine.tokenizer.encode("please")]]
    assert f"the first {left_out} tokens were left out" in page.said()[1]
    page.click("#xray")
    page.open_prompt(len(sent))
