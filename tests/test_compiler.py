"""Whether torch.compile works on this machine, as the probe reports it."""

from threading import Event, Thread

import pytest

from quern import compiler


def test_a_probe_that_fails_returns_the_first_line_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_probe", lambda x: x.no_such_method())
    found = compiler.problem.__wrapped__("cpu")
    assert found is not None and "no_such_method" in found and "\n" not in found and len(found) <= 120


def test_a_thread_without_the_compiler_leaves_the_others_as_they_were() -> None:
    before, entered, left, seen = compiler.is_eager(), Event(), Event(), []

    def other() -> None:
        seen.append(compiler.is_eager())
        with compiler.eager(not before):
            entered.set()
            left.wait(10)
            seen.append(compiler.is_eager())
        seen.append(compiler.is_eager())

    with compiler.eager(not before):
        thread = Thread(target=other)
        thread.start()
        assert entered.wait(10)
    assert compiler.is_eager() == before
    left.set()
    thread.join(10)
    assert seen == [before, not before, before] and compiler.is_eager() == before
