"""The chat: its loop and its commands, with a small random model and with replies made by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.chat.commands import HELP, run, token_name
from quern.chat.commands import talk as run_talk
from quern.chat.conversation import NO_WORDS, Conversation, ask
from quern.field_types import Seed, annotations_of, refuse_outside
from quern.generate.engine import Engine
from quern.generate.reply import Completion, Delta, Generation
from quern.generate.sampling import GREEDY, Sampling
from quern.model.context import CausalContext
from quern.terminal import printable
from quern.text.chat import Message, render, render_prompt, validate
from tests.browser.parrot import Parrot, make_parrot
from tests.support.small_text import read_conversations
from tests.support.toy_engine import toy_engine, toy_tokenizer

TOKENIZER, CONTEXT = toy_tokenizer(), 64
SAVED: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
    {
        "role": "assistant",
        "content": [{"type": "tool", "text": "1+2"}, {"type": "output", "text": "3"}, {"type": "text", "text": "3."}],
    },
]


class Recording(Engine):
    """Keeps what it is asked for."""

    def __init__(self, engine: Engine):
        super().__init__(engine.model, engine.tokenizer, engine.machine)
        self.asked: list[dict[str, Any]] = []

    def submit(self, prompts: Any, **options: Any) -> Generation:
        self.asked.append({"prompt": list(prompts[0]), **options})
        return super().submit(prompts, **options)

    def prompts(self) -> list[list[int]]:
        return [asked["prompt"] for asked in self.asked]


class Chat:
    """A conversation, and what `enter` has shown."""

    def __init__(self, engine: Engine, sampling: Sampling, max_tokens: int, seed: int) -> None:
        self.shown: list[str] = []
        self.conversation = Conversation(engine, sampling, max_tokens, seed, self.shown.append)

    def enter(self, *lines: str | type[BaseException], interactive: bool = False) -> str:
        """Returns what the chat shows when these lines are typed and the input ends. An exception: a pressed key.

        interactive: in a terminal, which shows prompts.
        """
        del self.shown[:]
        typed = iter(lines)

        def read(prompt: str) -> str:
            if interactive:
                self.shown.append(prompt)
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        run_talk(self.conversation, read, interactive)
        return "".join(self.shown)


class Recorded(Chat):
    def __init__(self) -> None:
        self.engine = Recording(toy_engine(context=256))
        super().__init__(self.engine, Sampling(), 6, seed=3)


@pytest.fixture
def chat() -> Recorded:
    return Recorded()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return toy_engine(context=CONTEXT)


def talk(engine: Engine, *lines: str | type[BaseException]) -> str:
    """Returns the text that a terminal shows of a new conversation."""
    return Chat(engine, GREEDY, 8, seed=0).enter(*lines, interactive=True)


def saying(*pieces: Delta | str) -> Parrot:
    parrot = make_parrot(CONTEXT)
    parrot.will_say(*pieces)
    return parrot


def prompts_of(parrot: Parrot) -> list[list[int]]:
    return [prompt for prompts, _ in parrot.asked for prompt in prompts]


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
    ("variables", "shown"),
    [
        ("TERM=xterm FORCE_COLOR=1", "\x1b[2m[1+1 → 2] \x1b[0mTwo.\n"),
        ("TERM=xterm FORCE_COLOR=1 NO_COLOR=1", "[1+1 → 2] Two.\n"),
        ("TERM=xterm", "[1+1 → 2] Two.\n"),
        ("TERM=dumb FORCE_COLOR=1 COLUMNS=10", "[1+1 → 2] Two.\n"),  # it is 15 columns wide, and not wrapped
    ],
)
def test_colours_and_wrapping_are_for_terminals_that_have_them(
    variables: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (one.split("=") for one in variables.split()):
        monkeypatch.setenv(name, value)
    calling = saying(Delta("tool", "1+1"), Delta("output", "2"), "Two.")
    how = {"sampling": GREEDY, "max_tokens": 8, "seed": 0}
    run(calling, "sft", "1 + 1?", False, Path("none"), lambda line: None, **how)
    assert capsys.readouterr().out == shown


def test_what_is_said_cannot_steer_the_terminal() -> None:
    hostile = saying("\x1b[2Jgone\r\x9b\x07, then\n\tthis")
    shown = talk(hostile, "What?")
    assert "\ufffd[2Jgone\ufffd\ufffd, then\n\tthis" in shown
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


# Commands -----------------------------------------------------------------------------------------------------


def prompt_of(*messages: tuple[str, str]) -> list[int]:
    return render_prompt(TOKENIZER, [{"role": role, "content": text} for role, text in messages])  # type: ignore[misc]


def test_an_unknown_command_is_refused_with_the_others_and_not_sent(chat: Recorded) -> None:
    shown = chat.enter("/sytem You", "/new x", "/etc/hosts, what is it?")
    assert chat.engine.asked == [] and shown.count("\n") == 3
    first, second, third = shown.splitlines()
    assert "there is no command /sytem; nearest: /system; /help lists all; a question that begins with /" in first
    assert second == "(/new takes nothing after it)" and "no command /etc/hosts" in third


def test_a_text_between_quotes_is_never_a_command(chat: Recorded) -> None:
    chat.enter('"""/new"""', '"""', "", "a \\", '/new"""', '""" """')
    assert chat.engine.prompts()[0] == prompt_of(("user", "/new"))
    assert [m["content"] for m in chat.conversation.messages if m["role"] == "user"] == ["/new", "a \\\n/new"]


def test_a_reply_is_made_again_with_the_next_seed(chat: Recorded) -> None:
    chat.enter("One?", "Two?")
    before = list(chat.conversation.messages)
    shown = chat.enter("/regenerate")
    assert [asked["seed"] for asked in chat.engine.asked] == [3, 4, 5]
    assert chat.engine.prompts()[2] == chat.engine.prompts()[1]
    after = chat.conversation.messages
    assert after[:-1] == before[:-1] and after[-1] != before[-1] and len(after) == 4
    [[expected]] = toy_engine(context=256).generate([chat.engine.prompts()[1]], max_tokens=6, seed=5)
    assert after[-1]["content"] == expected.parts and expected.text.strip() in shown
    assert "always the same" in chat.enter("/temperature 0", "/regenerate")


def test_a_text_is_continued_again(chat: Recorded) -> None:
    shown = chat.enter("/complete", " The", "/regenerate", "/new", "/regenerate")
    assert chat.engine.prompts() == [[TOKENIZER.bos, *TOKENIZER.encode(" The")]] * 2
    assert [asked["seed"] for asked in chat.engine.asked] == [3, 4]
    assert "(there is no text yet: enter something first)" in shown


def test_undo_removes_the_last_question(chat: Recorded) -> None:
    chat.enter("One?", "Two?", "/undo", "Three?")
    first, _, third = chat.engine.prompts()
    assert third[: len(first)] == first and "Two" not in TOKENIZER.decode(third)
    assert "(there is nothing to undo: " in chat.enter("/new", "/undo")
    assert "there is no reply" in chat.enter("/regenerate")


def test_the_system_message_is_set_shown_and_removed(chat: Recorded) -> None:
    shown = chat.enter("/system", "/system Be brief.", "One?", "/new", "One?", '/system ""', "/new", "One?")
    assert shown.startswith("(system message: none)\n(system message: Be brief.)\n")
    with_system, without = prompt_of(("system", "Be brief."), ("user", "One?")), prompt_of(("user", "One?"))
    assert chat.engine.prompts() == [with_system, with_system, without]


def test_settings_are_used_and_have_the_bounds_of_the_flags(chat: Recorded) -> None:
    chat.enter("/temperature 0.5", "/top-k 3", "/min_p 0.25", "/max_tokens 2e0", "/seed 9", "One?")
    asked = chat.engine.asked[0]
    assert asked["sampling"] == Sampling(0.5, top_k=3, min_p=0.25)
    assert (asked["max_tokens"], asked["seed"]) == (2, 9)
    for name, text, value in (
        ("temperature", "200", 200.0),
        ("top_k", "2.5", "2.5"),
        ("seed", "x", "x"),
        ("top_p", "2", 2.0),
    ):
        with pytest.raises(ValueError) as refused:
            refuse_outside(annotations_of(Sampling).get(name, Seed), value, name)
        assert chat.enter(f"/{name} {text}") == f"({refused.value})\n"
    assert "temperature 0.5, top_k 3, " in chat.enter("/temperature") and chat.conversation.seed == 10


def test_a_saved_conversation_is_read_by_fine_tuning_and_goes_on(chat: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "talk one.json"
    assert "nothing to save" in chat.enter(f"/save {path}") and not path.exists()
    shown = chat.enter("/system Be brief.", "Grüße?", f"/save {path}")
    assert shown.endswith(f"(saved in {path}: 1 question and its reply)\n")
    saved = json.loads(path.read_text(encoding="utf-8"))["messages"]
    validate(saved)
    assert saved == chat.conversation.with_system(chat.conversation.messages)
    [read] = read_conversations(path)
    assert (render(toy_tokenizer(), read)[0] == render(toy_tokenizer(), saved)[0]).all()
    before = path.read_bytes()
    assert "choose another name" in chat.enter("Two?", f"/save {path}") and path.read_bytes() == before
    other = Recorded()
    other.enter(f"/load {path}", "Two?")
    assert other.engine.prompts()[-1] == chat.engine.prompts()[-1]


def test_a_conversation_with_calls_is_loaded(chat: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(SAVED), encoding="utf-8")
    chat.enter(f"/load {path}", "/regenerate", f"/load {path}", "And 2 + 2?")
    again, following = chat.engine.prompts()
    assert again == render_prompt(TOKENIZER, SAVED[:2])
    assert following == render_prompt(TOKENIZER, [*SAVED, {"role": "user", "content": "And 2 + 2?"}])


@pytest.mark.parametrize("row", [{"question": "One?", "answer": "1"}, {"question": "?", "choices": ["a"], "answer": 0}])
def test_a_row_of_a_question_set_is_loaded(chat: Recorded, tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "row.json"
    path.write_text(json.dumps(row), encoding="utf-8")
    assert "(loaded: 1 question and its reply)" in chat.enter(f"/load {path}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file or directory: check the path, or choose another place"),
        ("{", "is not a conversation, one JSON object as /save writes it: Expecting property name"),
        ("[" * 100_000, "is not a conversation"),
        ('[{"role": "user", "tool_calls": 3}]', "is not a conversation"),
        (json.dumps(SAVED[:2]), "ends with a question"),
        (b"\xff\xfe", "is not a conversation, one JSON object"),
    ],
    ids="missing broken deep no-content question not-utf-8".split(),
)
def test_a_file_that_is_no_conversation_changes_nothing(
    chat: Recorded, tmp_path: Path, text: str | bytes | None, reason: str
) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = SAVED[1:]
    chat.conversation.system, chat.conversation.messages = "Stay.", list(before)
    shown = chat.enter(f"/load {path}", "/load")
    assert reason in shown.splitlines()[0] and str(path) in shown and shown.endswith("(name a file: /load FILE)\n")
    assert "~no-such-user/a: No such file or directory" in chat.enter("/load ~no-such-user/a")
    assert (chat.conversation.messages, chat.conversation.system) == (before, "Stay.")


@pytest.mark.parametrize("completing", [False, True])
def test_xray_shows_the_probabilities_of_the_model(chat: Recorded, completing: bool) -> None:
    """The oracle: the whole reply through the model at once."""
    assert "there is no reply to show" in chat.enter("/xray")
    chat.enter("/temperature 0.1", *(["/complete"] if completing else []), "The miller")
    lines = chat.enter("/xray").splitlines()
    reply, prompt = chat.conversation.last, chat.engine.prompts()[0]
    assert reply is not None and len(lines) == len(reply.ids) + 1
    with torch.no_grad():
        model = chat.engine.model
        logits_TV = model.logits(model(torch.tensor([[*prompt, *reply.ids]]), CausalContext())[0])
    probability_TV = logits_TV[:, : TOKENIZER.vocab_size].float().softmax(-1)
    for place, (token, line) in enumerate(zip(reply.ids, lines[1:], strict=True)):
        here_V = probability_TV[len(prompt) + place - 1]
        best = [int(id) for id in here_V.topk(4).indices if id != token][:3]
        shown = [f"{token_name(TOKENIZER, id)} {_percent(here_V[id])}" for id in best]
        assert line.startswith(token_name(TOKENIZER, token)) and "\x1b" not in line
        assert line.endswith(f"  {_percent(here_V[token])}  {', '.join(shown)}")


def _percent(probability: torch.Tensor) -> str:
    return f"{100 * float(probability):.1f} %"


def test_xray_tells_chosen_from_given_tokens(chat: Recorded) -> None:
    a, b, end = *TOKENIZER.encode("a"), *TOKENIZER.encode("\n"), TOKENIZER.special("<|output_end|>")
    quarter, half = math.log(0.25), math.log(0.5)
    tops = [[(b, half), (a, quarter)], [(a, half)]]
    chat.conversation.last = Completion([a, end], "a", "stop", [], 1, [True, False], [quarter, half], tops)
    assert chat.enter("/xray").splitlines() == [
        "token           probability  likeliest other tokens",
        '"a"                  25.0 %  "\\n" 50.0 %',
        "<|output_end|>        given  by the tool",
    ]


def test_tokens_are_named_so_that_they_cannot_be_confused() -> None:
    [newline], spelt = TOKENIZER.encode("\n"), TOKENIZER.encode("👋")[0]
    assert token_name(TOKENIZER, newline) == '"\\n"'
    assert token_name(TOKENIZER, TOKENIZER.bos) == "<|bos|>"
    [escape] = TOKENIZER.encode("\x1b")
    assert token_name(TOKENIZER, escape) == '"\\u001b"'
    assert token_name(TOKENIZER, spelt) == repr(TOKENIZER.decode_bytes([spelt]))
