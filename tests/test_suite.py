"""The suite itself: a test cannot reach beyond this machine, the order of files names files that exist, and what
`make check` gives to pyright."""

import os
import socket
from pathlib import Path

import pytest

from tests.changed import changed
from tests.conftest import SERVERS, SLOWEST_FIRST
from tests.support.line_server import ROOT


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.invalid", 443)])
def test_a_connection_to_elsewhere_is_refused(address: tuple[str, int]) -> None:
    with socket.socket() as client, pytest.raises(PermissionError, match="serve it from 127.0.0.1"):
        client.connect(address)


def test_the_order_names_what_exists() -> None:
    assert [name for name in SLOWEST_FIRST if name not in SERVERS and not (ROOT / name).exists()] == []


def test_what_changed_and_what_imports_it(tmp_path: Path) -> None:
    texts = {
        "quern/a.py": "",
        "quern/b.py": "from quern.a import x\n",
        "quern/c.py": "def f():\n    from quern import (\n        other,\n        a,\n    )\n",
        "quern/d.py": "from quern.ab import x\nfrom quern import b\n",
        "quern/room/__init__.py": "",
        "tests/e.py": "import quern.room\n",
        "tests/f.py": "from quern.b import y\n",
        "pyproject.toml": "",
        "constraints.txt": "",
        "typings/x.pyi": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    stamp = tmp_path / "stamp"
    assert changed(stamp, tmp_path) is None, "a clean clone"
    stamp.touch()

    def later(name: str) -> list[str] | None:
        at = stamp.stat().st_mtime
        for path in tmp_path.rglob("*"):
            os.utime(path, (at - 9, at - 9) if path != stamp else (at, at))
        os.utime(tmp_path / name, (at + 1, at + 1))
        return changed(stamp, tmp_path)

    assert later("quern/a.py") == ["quern/a.py", "quern/b.py", "quern/c.py"]
    assert later("quern/room/__init__.py") == ["quern/room/__init__.py", "tests/e.py"]
    assert later("tests/f.py") == ["tests/f.py"]
    assert later("typings/x.pyi") is None and later("stamp") == []
