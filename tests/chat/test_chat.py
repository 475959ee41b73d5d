"""The loop of the chat, with a small random model and with replies made by hand."""

from pathlib import Path
from typing import Any

import pytest

from quern.chat.commands import HELP, run
from quern.chat.commands import talk as run_talk
from quern.chat.conversation import NO_WORDS, Conversation, ask
from quern.generate.engine import Engine
from quern.generate.reply import Delta
from quern.generate.sampling import Sampling
from quern.terminal import printable
from quern.text.chat import Message, render_prompt
from tests.browser.parrot import Parrot, make_parrot
from tests.support.toy_engine import toy_engine

CONTEXT = 64
GREEDY = Sampling(0.0, 0, 1.0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return toy_engine(context=CONTEXT)


def saying(*pieces: Delta | str) -> Parrot:
    parrot = make_parrot(CONTEXT)
    parrot.will_say(*pieces)
    return parrot


def prompts_of(parrot: Parrot) -> list[list[int]]:
    return [prompt for prompts, _ in parrot.asked for prompt in prompts]


def talk(engine: Engine, *lines: str | type[BaseException]) -> str:
    """What the terminal shows when these lines are typed; an exception is a key pressed instead."""
    shown: list[str] = []
    typed = iter(lines)

    def read(prompt: str) -> str:
        shown.append(prompt)
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    run_talk(Conversation(engine, GREEDY, max_tokens=8, seed=0, put=shown.append), read, interactive=True)
    return "".join(shown)


def test_the_pieces_joined_are_the_engines_reply(engine: Engine) -> None:
    messages: list[Message] = [{"role": "user", "content": "What hums?"}]
    shown: list[str] = []
    reply = ask(engine, messages, max_tokens=12, sampling=Sampling(1.0, 0, 1.0), seed=3, put=shown.append)
    [[expected]] = engine.generate([render_prompt(engine.tokenizer, messages)], max_tokens=12, seed=3)
    assert (reply.ids, reply.parts) == (expected.ids, expected.parts)
    assert "".join(shown) == printable("".join(p["text"] for p in expected.parts if p["type"] == "text"))
    assert len(shown) > 2 and "".join(shown)


def test_a_sum_is_shown_with_its_result_and_no_raw_mark_of_a_tool_ever() -> None:
    pieces = [Delta("tool", "384"), Delta("tool", "+"), Delta("tool", "527"), Delta("output", "911")]
    calling = saying(*pieces, "It is ", "911.")
    assert talk(calling, "384 + 527?") == f"{HELP}\n> [384+527 → 911] It is 911.\n> \n"
    for failed in (pieces[:2], [Delta("tool", "!"), Delta("output", "error")], [Delta("output", "911")]):
        assert talk(saying(*failed), "Hi") == f"{HELP}\n> {NO_WORDS}\n> \n"
        assert talk(saying(*failed, "Hello!"), "Hi") == f"{HELP}\n> Hello!\n> \n"


@pytest.mark.parametrize(
    ("variables", "coloured"), [("FORCE_COLOR", True), ("FORCE_COLOR NO_COLOR", False), ("", False)]
)
def test_colours_are_for_terminals_that_have_them(
    variables: str, coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name in variables.split():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm")
    calling = saying(Delta("tool", "1+1"), Delta("output", "2"), "Two.")
    how = {"sampling": GREEDY, "max_tokens": 8, "seed": 0}
    run(calling, "sft", "1 + 1?", False, Path("none"), lambda line: None, **how)
    shown = "\x1b[2m[1+1 → 2] \x1b[0mTwo.\n" if coloured else "[1+1 → 2] Two.\n"
    assert capsys.readouterr().out == shown


def test_what_is_said_cannot_steer_the_terminal() -> None:
    hostile = saying("\x1b[2Jgone\r\x9b\x07, then\n\tthis")
    shown = talk(hostile, "What?")
    assert "\ufffd[2Jgone\ufffd\ufffd\ufffd, then\n\tthis" in shown
    assert not set(shown) & set("\x1b\r\x9b\x07")


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt, "", "exit", " quit ", "/exit", "/quit"])
def test_nothing_to_ask_ends_it(engine: Engine, end: Any) -> None:
    assert talk(engine, end).startswith(f"{HELP}\n> ")


def test_the_conversation_goes_on_until_it_is_begun_anew() -> None:
    says = saying("Yes.")
    talk(says, "One?", "Two?", "/new", "One?")
    first, second, third = prompts_of(says)
    assert second[: len(first)] == first and len(second) > len(first)
    assert third == first


def test_a_conversation_that_outgrows_the_context_begins_anew() -> None:
    says = saying("Yes, the miller grinds the grain.")
    shown = talk(says, *["And the stone, does it hum?"] * 4)
    assert f"(the conversation is longer than the model's {CONTEXT} tokens: it starts over)" in shown
    prompts = prompts_of(says)
    assert max(map(len, prompts)) < CONTEXT
    assert prompts.count(prompts[0]) > 1


def test_a_question_too_long_is_told_and_the_chat_goes_on() -> None:
    says = saying("Yes.")
    shown = talk(says, "One?", "x" * 500, "Two?")
    prompts = prompts_of(says)
    assert f"the model's context holds {CONTEXT}" in shown and "shorten" in shown
    assert shown.count("Yes.") == 2
    assert "starts over" not in shown and prompts[-1][: len(prompts[0])] == prompts[0]


def test_ctrl_c_ends_the_reply_and_not_the_chat() -> None:
    stopped = saying("Once upon")
    stopped.failure = KeyboardInterrupt()
    shown = talk(stopped, "A story?", "A story?")
    assert shown.count("Once upon (stopped") == 2
    first, second = prompts_of(stopped)
    assert first == second
