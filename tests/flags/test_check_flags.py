"""Flags are read as they are documented; each mistake is refused in one line."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from quern.field_types import Count
from quern.flags.check_flags import Mark, Spelled, read


@dataclass
class Inner:
    """An inner part."""

    steps: int | None = None
    rate: float = 0.5
    in_background: bool = False


@dataclass
class Flags:
    folder: Path
    """A text of
    two lines: 100 % of it
    (in one paragraph)."""
    what: Annotated[tuple[Literal["a", "b"], ...], Mark.POSITIONAL] = ()
    inner: Inner = field(default_factory=Inner)
    plain: Annotated[Inner, Mark.FLAT] = field(default_factory=Inner)
    kinds: tuple[Literal["x", "y"], ...] = ()
    stop: Annotated[tuple[str, ...], Mark.REPEATED] = ()
    prompt: Annotated[str | None, Spelled("prompt", "-p")] = None
    rare: Annotated[Count, Mark.RARE] = 3
    """Default: three."""


F = Path("f")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--folder f", Flags(F)),
        (
            "a b --folder=f --inner.steps 3 --inner.rate 1e-3 --inner.in-background",
            Flags(F, ("a", "b"), Inner(3, 1e-3, True)),
        ),
        (
            "--folder f --inner.in_background --inner.steps 4e0 --no-in-background",
            Flags(F, inner=Inner(4, in_background=True)),
        ),
        ("--rate -3 --folder f --kinds x y -p hello", Flags(F, plain=Inner(rate=-3), kinds=("x", "y"), prompt="hello")),
        ("--folder f --stop a --stop b", Flags(F, stop=("a", "b"))),
        ("--folder f -p -hello", Flags(F, prompt="-hello")),
        ("--folder f --prompt=--x --rate=-3", Flags(F, plain=Inner(rate=-3), prompt="--x")),
    ],
)
def test_flags_are_read(typed: str, expected: Flags) -> None:
    assert read(Flags, typed.split(), prog="p") == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", "--folder is missing: see p --help"),
        ("--folder f --inner.steps many", "--inner.steps takes a whole number, not 'many'"),
        ("--folder f --inner.steps inf", "--inner.steps takes a whole number, not 'inf'"),
        ("--folder f --inner.rate", "--inner.rate takes a number: none was given"),
        ("--folder f --kinds --prompt -1", "--kinds takes one of x, y: none was given"),
        ("--folder=", "--folder is empty: give a path, or leave it out"),
        ("--folder f --kinds x z", "--kinds takes one of x, y, not 'z'"),
        ("c --folder f", "the argument takes one of a, b, not 'c'"),
        ("--folder f --inner.in-background=1", "--inner.in-background takes no value: give --inner.in-background or "),
        ("--folder f --inner.step 3", "unknown option --inner.step; nearest: --inner.steps"),
        ("--folder f -q", "unknown option -q; all of them: p --help"),
        ("--folder f --rare 0", "--rare must be a whole number between 1 and 1,000,000,000,000, not 0"),
        ("--folder f --kinds x --kinds y", "--kinds is given twice: give all its values after one --kinds"),
    ],
)
def test_a_mistake_is_refused_in_one_line(typed: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        read(Flags, typed.split(), prog="p")
    assert str(refused.value).startswith(expected) and "\n" not in str(refused.value)


@pytest.mark.parametrize("asked", ["--help", "--help-all"])
def test_help_joins_the_lines_of_a_text_and_is_shown_whatever_else_is_wrong(
    asked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        read(Flags, ["--nope", asked], prog="p", description="Reads.\n\nexample: p a")
    shown = re.sub(" {3,}", "  ", capsys.readouterr().out)
    assert "  --folder PATH  A text of two lines: 100 % of it (in one paragraph).\n" in shown
    assert "usage: p [WHAT …] [FLAGS]\n" in shown and "  --stop TEXT …  (default: none)\n" in shown
    assert "inner: An inner part.\n" in shown and "  --inner.steps INT" in shown and ended.value.code == 0
    assert ("  --rare INT  Default: three.\n" in shown) is (asked == "--help-all")
    assert ("all flags: p --help-all" in shown) is (asked == "--help")
