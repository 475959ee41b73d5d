"""The loop of the chat, with a small random model and with replies made by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.chat.commands import HELP, run
from quern.chat.commands import talk as run_talk
from quern.chat.conversation import NO_WORDS, Conversation, ask
from quern.generate.engine import Engine
from quern.generate.reply import Completion, Delta, Event
from quern.generate.sampling import Sampling
from quern.terminal import printable
from quern.text.chat import Message, render_prompt
from tests.support.toy_engine import toy_engine

CONTEXT = 64
GREEDY = Sampling(0.0, 0, 1.0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return toy_engine(context=CONTEXT)


class Scripted(Engine):
    """Says what it is given, piece by piece, and keeps the prompts; an exception among the pieces is raised there."""

    def __init__(self, engine: Engine, *pieces: Delta | BaseException):
        super().__init__(engine.model, engine.tokenizer, engine.machine)
        self.pieces = pieces
        self.prompts: list[list[int]] = []

    def events(self, prompts: Any, **arguments: Any) -> Iterator[Event]:
        self.prompts += [list(prompt) for prompt in prompts]
        super().events(prompts, **arguments)  # refuses what the engine refuses
        return self._said()

    def _said(self) -> Iterator[Event]:
        parts: list[Any] = []
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield Event(0, 0, piece)
            if parts and parts[-1]["type"] == piece.kind:
                parts[-1]["text"] += piece.text
            else:
                parts.append({"type": piece.kind, "text": piece.text})
        yield Event(0, 0, Completion([1], "", "stop", parts, 1))


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


def test_a_sum_is_shown_with_its_result_and_no_raw_mark_of_a_tool_ever(engine: Engine) -> None:
    pieces = [Delta("tool", "384"), Delta("tool", "+"), Delta("tool", "527"), Delta("output", "911")]
    calling = Scripted(engine, *pieces, Delta("text", "It is "), Delta("text", "911."))
    assert talk(calling, "384 + 527?") == f"{HELP}\n> [384+527 → 911] It is 911.\n> \n"
    for failed in (pieces[:2], [Delta("tool", "!"), Delta("output", "error")], [Delta("output", "911")]):
        assert talk(Scripted(engine, *failed), "Hi") == f"{HELP}\n> {NO_WORDS}\n> \n"
        assert talk(Scripted(engine, *failed, Delta("text", "Hello!")), "Hi") == f"{HELP}\n> Hello!\n> \n"


@pytest.mark.parametrize(
    ("variables", "coloured"), [("FORCE_COLOR", True), ("FORCE_COLOR NO_COLOR", False), ("", False)]
)
def test_colours_are_for_terminals_that_have_them(
    engine: Engine, variables: str, coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name in variables.split():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm")
    calling = Scripted(engine, Delta("tool", "1+1"), Delta("output", "2"), Delta("text", "Two."))
    how = {"sampling": GREEDY, "max_tokens": 8, "seed": 0}
    run(calling, "sft", "1 + 1?", False, Path("none"), lambda line: None, **how)
    shown = "\x1b[2m[1+1 → 2] \x1b[0mTwo.\n" if coloured else "[1+1 → 2] Two.\n"
    assert capsys.readouterr().out == shown


def test_what_is_said_cannot_steer_the_terminal(engine: Engine) -> None:
    hostile = Scripted(engine, Delta("text", "\x1b[2Jgone\r\x9b\x07, then\n\tthis"))
    shown = talk(hostile, "What?")
    assert "\ufffd[2Jgone\ufffd\ufffd\ufffd, then\n\tthis" in shown
    assert not set(shown) & set("\x1b\r\x9b\x07")


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt, "", "exit", " quit ", "/exit", "/quit"])
def test_nothing_to_ask_ends_it(engine: Engine, end: Any) -> None:
    assert talk(engine, end).startswith(f"{HELP}\n> ")


def test_the_conversation_goes_on_until_it_is_begun_anew(engine: Engine) -> None:
    says = Scripted(engine, Delta("text", "Yes."))
    talk(says, "One?", "Two?", "/new", "One?")
    first, second, third = says.prompts
    assert second[: len(first)] == first and len(second) > len(first)
    assert third == first


def test_a_conversation_that_outgrows_the_context_begins_anew(engine: Engine) -> None:
    says = Scripted(engine, Delta("text", "Yes, the miller grinds the grain."))
    shown = talk(says, *["And the stone, does it hum?"] * 4)
    assert f"(the conversation is longer than the model's {CONTEXT} tokens: it starts over)" in shown
    assert max(map(len, says.prompts)) < CONTEXT
    assert says.prompts.count(says.prompts[0]) > 1


def test_a_question_too_long_is_told_and_the_chat_goes_on(engine: Engine) -> None:
    says = Scripted(engine, Delta("text", "Yes."))
    shown = talk(says, "One?", "x" * 500, "Two?")
    assert f"the model's context holds {CONTEXT}" in shown and "shorten" in shown
    assert shown.count("Yes.") == 2
    assert "starts over" not in shown and says.prompts[-1][: len(says.prompts[0])] == says.prompts[0]


def test_ctrl_c_ends_the_reply_and_not_the_chat(engine: Engine) -> None:
    stopped = Scripted(engine, Delta("text", "Once upon"), KeyboardInterrupt())
    shown = talk(stopped, "A story?", "A story?")
    assert shown.count("Once upon (stopped") == 2
    assert stopped.prompts[0] == stopped.prompts[1]
