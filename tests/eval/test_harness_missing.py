"""Without lm-evaluation-harness, `--harness` says how to install it, before anything is evaluated."""

import sys

import pytest

from quern.stages.evaluate import _harness
from tests.support.tiny_model import CPU


def test_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "quern.eval.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"lm-evaluation-harness needs extra .*pip install -e '\.\[eval\]'") as raised:
        _harness(CPU, ["arc_easy"], None)
    assert "\n" not in str(raised.value)
