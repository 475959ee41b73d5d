"""Commands of `quern` in the process of a test: the fixture `told` of tests/conftest.py."""

from collections.abc import Callable
from typing import Any

import pytest

Told = Callable[..., str]


def run(*words: Any, code: int = 0) -> None:
    """Runs a command, which must end with this code."""
    from quern.cli import main  # which takes seconds, and many tests do not need it

    assert main.main([*map(str, words)]) == code


def runner(capsys: pytest.CaptureFixture[str]) -> Told:
    def told(*words: Any, code: int = 0) -> str:
        """Returns what a command prints on standard output, or on standard error where it is refused with 1."""
        capsys.readouterr()
        run(*words, code=code)
        printed = capsys.readouterr()
        return printed.err if code == 1 else printed.out

    return told
