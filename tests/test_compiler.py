"""Whether torch.compile works on this machine, as the probe reports it."""

import pytest

from quern import compiler


def test_mps_does_not_compile() -> None:
    assert compiler.problem("mps") is not None


@pytest.mark.skipif(compiler.problem("cpu") is not None, reason="torch.compile does not work on this machine")
def test_a_probe_that_fails_returns_the_first_line_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_probe", lambda x: x.no_such_method())
    found = compiler.problem.__wrapped__("cpu")
    assert found is not None and "no_such_method" in found and "\n" not in found and len(found) <= 120
