"""`quern complete`, and the chat's completion mode, on random models: what reaches the terminal, and from where."""

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from quern import compiler
from quern.chat.commands import COMPLETING, HELP, talk
from quern.chat.conversation import Conversation
from quern.cli import main
from quern.generate.engine import Engine
from quern.generate.reply import Event
from quern.generate.sampling import Sampling
from quern.model.context import CausalContext
from quern.stages.complete import complete, continuations, read_prompt
from quern.terminal import CONTROL, printable
from quern.train import checkpoint
from tests.generate.test_engine import Scripted
from tests.support.llama_run import llama_recipe, model_of, random_state, write_run
from tests.support.toy_engine import CPU, toy_engine, toy_tokenizer

PROMPT = "The miller"
TOKENIZER = toy_tokenizer()
CONTEXT = 48
FLAGS = ("--no-compile", "--dtype", "fp32", "--threads", "1")


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    with compiler.eager():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run `first` has a random base model and nothing else."""
    out = tmp_path_factory.mktemp("base")
    write_run(out, llama_recipe(context=CONTEXT))
    return out


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run `first` has another random model as its stage sft."""
    out = tmp_path_factory.mktemp("tuned")
    recipe = llama_recipe(context=CONTEXT)
    places, state = write_run(out, recipe), random_state(recipe)
    meta = {"recipe": recipe.to_json(), "tokenizer": TOKENIZER.fingerprint, "seed": 0, "state": state.meta()}
    turned = {name: tensor.flip(-1).contiguous() for name, tensor in state.tensors().items()}
    checkpoint.save(places.checkpoints("sft"), 7, turned, meta, keep=1)
    return out


def run(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str, verb: str = "complete") -> str:
    """What the command prints on standard output."""
    capsys.readouterr()
    assert main.main([verb, "--out", str(out), *FLAGS, *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str) -> str:
    """The error of the command; standard output stays empty."""
    capsys.readouterr()
    assert main.main(["complete", "--out", str(out), *FLAGS, *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


@torch.no_grad()
def greedy(model: Any, prompt: str, max_tokens: int) -> str:
    """The oracle: the whole row through the model for every token, without a cache and without the engine."""
    ids = [TOKENIZER.bos, *TOKENIZER.encode(prompt)]
    start, specials = len(ids), set(TOKENIZER.special_ids.values())
    while len(ids) < min(start + max_tokens, CONTEXT):
        logits_BV = model.logits(model(torch.tensor([ids]), CausalContext())[:, -1])
        token = int(logits_BV.argmax())
        if token in specials:
            break
        ids.append(token)
    return CONTROL.sub("\ufffd", prompt + TOKENIZER.decode_bytes(ids[start:]).decode("utf-8", errors="ignore"))


class Follows(dict[int, int]):
    """After each token comes the given one; after any other token, `otherwise`."""

    def __init__(self, otherwise: int, follows: dict[int, int]):
        super().__init__(follows)
        self.otherwise = otherwise

    def get(self, key: int, default: Any = None) -> Any:
        return super().get(key, self.otherwise)


class Certain(Scripted):
    """Gives all probability to the next token, at any temperature."""

    def logits(self, x_BD: torch.Tensor) -> torch.Tensor:
        return 1000.0 * super().logits(x_BD)


def scripted(*tokens: int | str) -> Engine:
    """An engine whose reply is these tokens, repeated from the first; each may occur once."""
    ids = [TOKENIZER.special(token) if isinstance(token, str) else token for token in tokens]
    follows = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    return Engine(Certain(Follows(ids[0], follows)), TOKENIZER, CPU)  # type: ignore[arg-type]


def pieces(engine: Engine, prompt: str, max_tokens: int = 40, temperature: float = 0.0, **arguments: Any) -> list[str]:
    shown: list[str] = []
    sampling = Sampling(temperature, 0, 1.0)
    complete(engine, prompt, max_tokens=max_tokens, sampling=sampling, seed=3, put=shown.append, **arguments)
    return shown


# What is continued, and how it ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", "Grüße aus Köln! 👋🏽", "a <|bos|> b"])
def test_it_is_greedy_generation_without_a_cache(prompt: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, base, "--temperature", "0", "--max-tokens", "30", "-p", prompt)
    expected = greedy(model_of(llama_recipe(context=CONTEXT)), prompt, 30)
    assert printed == expected + "\n" and len(expected) > len(prompt)


def test_the_base_model_continues_unless_the_stage_says_otherwise(
    tuned: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--temperature", "0", "--max-tokens", "30", "-p", PROMPT)
    assert run(capsys, tuned, *flags) == run(capsys, base, *flags) != run(capsys, tuned, "--stage", "sft", *flags)
    assert run(capsys, tuned, "--complete", *flags, verb="chat") == run(capsys, tuned, *flags)
    assert run(capsys, base, *flags, verb="chat") == run(capsys, base, *flags)
    assert "no stage 'sft'" in refused(capsys, base, "--stage", "sft", *flags)


def test_every_special_token_ends_the_text_and_none_is_printed_or_calls_a_tool() -> None:
    for special in TOKENIZER.special_tokens:
        assert "".join(pieces(scripted(*b"say", special, *b"more"), "I ")) == "I say\n", special
    engine = scripted(*b"x", "<|tool_start|>", *b"1+2", "<|tool_end|>", *b"y", "<|assistant_end|>")
    assert "".join(pieces(engine, "I ")) == "I x\n"
    no_text = cast(Any, None)  # openings of the built-in world need none
    assert {text for _, text in continuations(engine, llama_recipe(), no_text)} == {"x"}


def test_a_character_is_printed_whole_or_not_at_all_and_none_steers_the_terminal() -> None:
    shown = pieces(scripted(*"😀é".encode()), "👋🏽 ", max_tokens=17)
    assert shown == ["👋🏽 ", *["😀", "é"] * 2, "😀", "\n"]
    shown = "".join(pieces(scripted(*b"\x1b[2J\r", "<|bos|>"), "a\x07b\tc\n"))
    assert shown == "a\ufffdb\tc\n\ufffd[2J\ufffd\n"


def test_the_pieces_of_a_random_model_joined_are_its_bytes() -> None:
    engine = toy_engine(context=256)
    for seed in range(4):
        ids = [TOKENIZER.bos, *TOKENIZER.encode("👋🏽 😀")]
        [[done]] = engine.generate([ids], max_tokens=200, seed=seed, plain=True)
        shown: list[str] = []
        complete(engine, "👋🏽 😀", max_tokens=200, sampling=Sampling(1.0, 0, 1.0), seed=seed, put=shown.append)
        specials = set(TOKENIZER.special_ids.values())
        written = TOKENIZER.decode_bytes(id_ for id_ in done.ids if id_ not in specials)
        expected = "👋🏽 😀" + CONTROL.sub("\ufffd", written.decode("utf-8", errors="ignore")) + "\n"
        assert "".join(shown) == expected
        assert specials.isdisjoint(done.ids[:-1])


def test_stop_strings_end_it_before_them(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--temperature", "0", "--max-tokens", "30", "-p", PROMPT)
    whole = run(capsys, base, *flags).removeprefix(PROMPT)
    _, early, *_, late = re.findall(r"[^\ufffd\n-]{2}", whole)  # what can be typed and is not a flag
    assert 0 < whole.index(early) < whole.index(late)
    for stops in ([early], [late], [early, late], [late, early]):
        given = [argument for stop in stops for argument in ("--stop", stop)]
        expected = whole[: min(whole.index(stop) for stop in stops)]
        assert run(capsys, base, *flags, *given) == PROMPT + expected + "\n"
    assert "--stop is empty" in refused(capsys, base, *flags, "--stop", "")


def test_several_samples_are_printed_in_order_and_the_first_is_the_only_one_of_n_1(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--temperature", "1", "--max-tokens", "12", "--seed", "5", "-p", PROMPT)
    one, three = run(capsys, base, *flags), run(capsys, base, *flags, "-n", "3")
    texts = three.split("---\n")
    assert len(set(texts)) == 3 and texts[0] == one
    assert all(text.startswith(PROMPT) and text.endswith("\n") for text in texts)
    assert one == run(capsys, base, *flags) != run(capsys, base, *flags, "--seed", "6")
    assert "--samples must be a whole number between 1" in refused(capsys, base, *flags, "-n", "0")


def test_the_first_sample_is_streamed_and_does_not_wait_for_the_others() -> None:
    """Each of its pieces is printed before the engine makes the next event."""
    engine, log = toy_engine(context=64), []

    class Logged(Engine):
        def events(self, prompts: Any, **arguments: Any) -> Iterator[Event]:
            for event in super().events(prompts, **arguments):
                log.append(event)
                yield event

    logged = Logged(engine.model, engine.tokenizer, engine.machine)
    arguments: dict[str, Any] = {"max_tokens": 40, "sampling": Sampling(1.0, 0, 1.0), "seed": 3, "put": log.append}
    complete(logged, PROMPT, samples=3, **arguments)
    assert log[0] == PROMPT
    own = [
        (log[at].value, log[at + 1]) for at in range(1, len(log)) if isinstance(log[at], Event) and not log[at].sample
    ]
    assert [printable(value.text) for value, _ in own[:-1]] == [printed for _, printed in own[:-1]] and len(own) > 5
    assert own[-1][1] == f"\n---\n{PROMPT}"


# Where the prompt comes from -----------------------------------------------------------------------------------


def test_a_prompt_on_standard_input(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(capsys, base, "--max-tokens", "6", "-p", PROMPT)
    piped(monkeypatch, b"The miller\n")
    assert run(capsys, base, "--max-tokens", "6") == expected
    for content, prompt in ((b"The miller", PROMPT), (b"The\nmiller\n\n", "The\nmiller\n"), (b"", "")):
        piped(monkeypatch, content)
        assert read_prompt("-", sys.stdin) == prompt
    piped(monkeypatch, b"a\xff")
    assert "the prompt on standard input is not UTF-8" in refused(capsys, base)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert 'there is no prompt: give one with -p "Once upon"' in refused(capsys, base)
    monkeypatch.setattr("sys.stdin", None)
    assert "there is no prompt" in refused(capsys, base)
    assert main.main(["complete", "Once upon"]) == 1
    assert "the text needs -p before it: quern complete -p 'Once upon'" in capsys.readouterr().err
    error = refused(capsys, base, "-p", "x" * 500)
    assert re.search(rf"the prompt has \d+ tokens and the model's context holds {CONTEXT}", error)


# In the chat ---------------------------------------------------------------------------------------------------


def test_a_chat_with_a_base_model_continues_texts_and_says_why(
    base: Path, tuned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run(capsys, base, "--temperature", "0", "--max-tokens", "20", "-p", PROMPT)
    flags = ["--out", *("{}", *FLAGS), "--temperature", "0", "--max-tokens", "20"]
    for out, named, told in ((base, [], True), (tuned, ["--stage", "pretrain"], True), (tuned, ["--complete"], False)):
        piped(monkeypatch, b"The miller\n\n")
        assert main.main(["chat", *(flag.format(out) for flag in flags), *named]) == 0
        printed = capsys.readouterr()
        assert printed.out == text  # no prompt, no greeting
        assert ("never taught the chat format" in printed.err) == told
    piped(monkeypatch, b"/complete\n/chat\n")
    assert main.main(["chat", *(flag.format(tuned) for flag in flags)]) == 0
    assert capsys.readouterr().out == f"{COMPLETING}\n{HELP}\n"


def test_a_pipe_that_is_closed_or_not_utf_8_ends_the_chat(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run(capsys, base, verb="chat") == ""
    piped(monkeypatch, b"gr\xfc\xdfe\n")
    assert main.main(["chat", "--out", str(base), *FLAGS]) == 1
    assert "quern chat: standard input is not UTF-8" in capsys.readouterr().err


def talked(engine: Engine, *lines: str, completing: bool = False) -> list[str]:
    """What a chat shows for these lines, without a terminal."""
    shown: list[str] = []
    typed = iter([*lines, ""])
    conversation = Conversation(engine, Sampling(0.0, 0, 1.0), 8, seed=0, put=shown.append, completing=completing)
    talk(conversation, lambda prompt: next(typed), interactive=False)
    return shown


def test_the_mode_is_switched_inside_the_chat() -> None:
    """A text is continued without the conversation, which goes on after it."""
    engine = Recording(toy_engine(context=256))
    shown = "".join(talked(engine, "One?", "/complete", " The miller ", "/chat", "Two?"))
    assert shown.count(COMPLETING) == 1 and shown.count(HELP) == 1
    first, text, second = engine.prompts
    assert text == [TOKENIZER.bos, *TOKENIZER.encode(" The miller ")]
    assert second[: len(first)] == first and engine.plain == [False, True, False]


def test_in_the_chat_a_text_too_long_or_stopped_ends_alone() -> None:
    engine = Recording(toy_engine(context=64))
    engine.interrupt = "stop me"
    shown = talked(engine, "x" * 500, "stop me", "go on", completing=True)
    assert "context holds 64" in shown[0]
    assert "".join(shown[1:]).startswith("stop me\n(stopped)\ngo on")


class Recording(Engine):
    """Keeps the prompts; Ctrl-C is pressed during the completion of `interrupt`."""

    def __init__(self, engine: Engine):
        super().__init__(engine.model, engine.tokenizer, engine.machine)
        self.prompts: list[list[int]] = []
        self.plain: list[bool] = []
        self.interrupt: str | None = None

    def events(self, prompts: Any, **arguments: Any) -> Iterator[Event]:
        self.prompts += [list(prompt) for prompt in prompts]
        self.plain.append(arguments.get("plain", False))
        events = super().events(prompts, **arguments)
        text = TOKENIZER.decode(prompts[0][1:])
        return self._interrupted() if text == self.interrupt else events

    def _interrupted(self) -> Iterator[Event]:
        raise KeyboardInterrupt
        yield
