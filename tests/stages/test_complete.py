"""`quern complete`, and the chat's completion mode, on random models: what reaches the terminal, and from where."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.chat.commands import COMPLETING, HELP
from quern.model.context import CausalContext
from quern.stages.complete import OPENING, read_prompt
from quern.terminal import CONTROL
from quern.train import checkpoint
from tests.support.command import Told
from tests.support.command import run as run_command
from tests.support.exported import model_of, random_state, toy_recipe, write_run
from tests.support.toy_engine import toy_tokenizer

pytestmark = pytest.mark.usefixtures("eager")

PROMPT = "The miller"
TOKENIZER = toy_tokenizer()
CONTEXT = 48
FLAGS = ("--no-compile", "--dtype", "fp32", "--threads", "1")
GREEDY = ("--temperature", "0", "--max-tokens", "30", "-p", PROMPT)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run `first` has a random base model and nothing else."""
    out = tmp_path_factory.mktemp("base")
    write_run(out, toy_recipe("llama", context=CONTEXT))
    return out


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run `first` has another random model as its stage sft."""
    out = tmp_path_factory.mktemp("tuned")
    recipe = toy_recipe("llama", context=CONTEXT)
    places, state = write_run(out, recipe), random_state(recipe)
    meta = {"recipe": recipe.to_json(), "tokenizer": TOKENIZER.fingerprint, "seed": 0, "state": state.meta()}
    turned = {name: tensor.flip(-1).contiguous() for name, tensor in state.tensors().items()}
    checkpoint.save(places.checkpoints("sft"), 7, turned, meta, keep=1)
    return out


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Told:
    def told(out: Path, *flags: str, verb: str = "complete", code: int = 0) -> str:
        """Returns the standard output; if the command is refused, checks that this is empty, and returns the error."""
        capsys.readouterr()
        run_command(verb, "--out", out, *FLAGS, *flags, code=code)
        printed = capsys.readouterr()
        assert code == 0 or printed.out == ""
        return printed.err if code else printed.out

    return told


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
    text = prompt + TOKENIZER.decode_bytes(ids[start:]).decode("utf-8", errors="ignore")
    return CONTROL.sub("\ufffd", text.replace("\r", ""))


def test_an_opening_of_a_windows_text_ends_with_a_word() -> None:
    opening = OPENING.search("It ignores kernel\r\nmodules\r\n")
    assert opening is not None and opening[0] == "It ignores kernel"


# What is continued, and how it ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", "Grüße aus Köln! 👋🏽", "a <|bos|> b"])
def test_it_is_greedy_generation_without_a_cache(prompt: str, base: Path, run: Told) -> None:
    printed = run(base, "--temperature", "0", "--max-tokens", "30", "-p", prompt)
    expected = greedy(model_of(toy_recipe("llama", context=CONTEXT)), prompt, 30)
    assert printed == expected + "\n" and len(expected) > len(prompt)


def test_the_base_model_continues_unless_the_stage_says_otherwise(tuned: Path, base: Path, run: Told) -> None:
    assert run(tuned, *GREEDY) == run(base, *GREEDY) != run(tuned, "--stage", "sft", *GREEDY)
    assert run(tuned, "--complete", *GREEDY, verb="chat") == run(tuned, *GREEDY)
    assert run(base, *GREEDY, verb="chat") == run(base, *GREEDY)
    assert "no stage 'sft'" in run(base, "--stage", "sft", *GREEDY, code=1)


def test_stop_strings_end_it_before_them(base: Path, run: Told) -> None:
    whole = run(base, *GREEDY).removeprefix(PROMPT)
    _, early, *_, late = re.findall(r"[^\ufffd\n-]{2}", whole)  # what can be typed and is not a flag
    assert 0 < whole.index(early) < whole.index(late)
    printed = run(base, *GREEDY, "--stop", late, "--stop", early)
    assert printed == PROMPT + whole[: whole.index(early)] + "\n"
    assert "--stop is empty" in run(base, *GREEDY, "--stop", "", code=1)


def test_several_samples_are_printed_in_order_and_the_first_is_the_only_one_of_n_1(base: Path, run: Told) -> None:
    flags = ("--temperature", "1", "--max-tokens", "12", "--seed", "5", "-p", PROMPT)
    one, three = run(base, *flags), run(base, *flags, "-n", "3")
    texts = three.split("---\n")
    assert len(set(texts)) == 3 and texts[0] == one
    assert all(text.startswith(PROMPT) and text.endswith("\n") for text in texts)
    assert one == run(base, *flags) != run(base, *flags, "--seed", "6")
    assert "--samples must be a whole number between 1" in run(base, *flags, "-n", "0", code=1)


# Where the prompt comes from -----------------------------------------------------------------------------------


def test_a_prompt_on_standard_input(base: Path, run: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(base, "--max-tokens", "6", "-p", PROMPT)
    piped(monkeypatch, b"The miller\n")
    assert run(base, "--max-tokens", "6") == expected
    for content, prompt in (
        (b"The miller", PROMPT),
        (b"\xef\xbb\xbfThe miller", PROMPT),
        (b"The\nmiller\n\n", "The\nmiller\n"),
        (b"", ""),
    ):
        piped(monkeypatch, content)
        assert read_prompt("-", sys.stdin) == prompt
    piped(monkeypatch, b"a\xff")
    assert "the prompt on standard input is not UTF-8" in run(base, code=1)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert 'there is no prompt: give one with -p "Once upon"' in run(base, code=1)
    error = run(base, "-p", "x" * 500, code=1)
    assert re.search(rf"the prompt has \d+ tokens and the model's context holds {CONTEXT}", error)


# In the chat ---------------------------------------------------------------------------------------------------


def test_a_chat_with_a_base_model_continues_texts_and_says_why(
    base: Path, tuned: Path, run: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run(base, "--temperature", "0", "--max-tokens", "20", "-p", PROMPT)
    flags = [*FLAGS, "--temperature", "0", "--max-tokens", "20"]
    for out, named, told in ((base, [], True), (tuned, ["--stage", "pretrain"], True), (tuned, ["--complete"], False)):
        piped(monkeypatch, b"The miller\n\n")
        run_command("chat", "--out", out, *flags, *named)
        printed = capsys.readouterr()
        assert printed.out == text  # no prompt, no greeting
        assert ("never taught the chat format" in printed.err) == told
    piped(monkeypatch, b"/complete\n/chat\n")
    assert run(tuned, verb="chat") == f"{COMPLETING}\n{HELP}\n"
