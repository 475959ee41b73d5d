"""What tyro reads is read alike; what it refuses is refused in one line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from quern.flags.check_flags import read


@dataclass
class Inner:
    steps: int | None = None
    rate: float = 0.5
    in_background: bool = False


@dataclass
class Flags:
    folder: Path
    what: Annotated[tuple[Literal["a", "b"], ...], tyro.conf.Positional] = ()
    inner: Inner = field(default_factory=Inner)
    plain: Annotated[Inner, tyro.conf.arg(name="")] = field(default_factory=Inner)
    kinds: tuple[Literal["x", "y"], ...] = ()
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    prompt: Annotated[str | None, tyro.conf.arg(aliases=["-p"])] = None


@pytest.mark.parametrize(
    "typed",
    [
        "--folder f",
        "a b --folder=f --inner.steps 3 --inner.rate 1e-3 --inner.in-background",
        "--folder f --inner.in_background --inner.steps 4 --no-in-background",
        "--rate -3 --folder f --kinds x y -p hello",
        "--folder f --kinds --prompt -1",
        "--folder f --stop a --stop b",
        "--folder f --inner.in-background --inner.no-in-background --inner.rate 1 --inner.rate 2",
    ],
)
def test_what_is_read_is_what_tyro_reads(typed: str) -> None:
    assert read(Flags, typed.split(), prog="p") == tyro.cli(Flags, args=typed.split())


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", "--folder is missing: see p --help"),
        ("--folder f --inner.steps many", "--inner.steps takes a whole number, not 'many'"),
        ("--folder f --inner.steps=2.5", "--inner.steps takes a whole number, not '2.5'"),
        ("--folder f --inner.rate", "--inner.rate takes a number: none was given"),
        ("--folder --inner.rate 3", "--folder takes a value: none was given"),
        ("--folder f --kinds x z", "--kinds takes one of x, y, not 'z'"),
        ("c --folder f", "the argument takes one of a, b, not 'c'"),
        ("--folder f --inner.in-background=1", "--inner.in-background takes no value: give --inner.in-background or "),
        ("--folder f --inner.step 3", "unknown option --inner.step; nearest: --inner.steps"),
        ("--folder f --background", "unknown option --background; nearest: --in-background"),
        ("a --kinds x b", "--kinds takes one of x, y, not 'b'"),
        ("--folder f -q", "unknown option -q; all of them: p --help"),
    ],
)
def test_what_is_refused_is_refused_by_tyro_too(typed: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError) as refused:
        read(Flags, typed.split(), prog="p")
    assert str(refused.value).startswith(expected) and "\n" not in str(refused.value)
    with pytest.raises(SystemExit):
        tyro.cli(Flags, args=typed.split())
    capsys.readouterr()


@pytest.mark.parametrize("typed", [["-p", "-hello"], ["--prompt", "-x"], ["--prompt=-x"], ["--prompt=--x"]])
def test_a_value_may_begin_with_a_dash(typed: list[str]) -> None:
    expected = typed[-1].removeprefix("--prompt=")
    assert read(Flags, ["--folder", "f", *typed, "--rate=-3"], prog="p").prompt == expected


def test_a_list_is_given_once() -> None:
    """tyro keeps the last one, silently."""
    with pytest.raises(ValueError, match="^--kinds is given twice: give all its values after one --kinds$"):
        read(Flags, ["--folder", "f", "--kinds", "x", "--kinds", "y"], prog="p")


def test_help_is_shown_whatever_else_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(Flags, ["--nope", "--help"], prog="p")
    assert "--inner.steps" in capsys.readouterr().out
