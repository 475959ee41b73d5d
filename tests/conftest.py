"""Shared by every test: the `law` fixture, reproducible hypothesis, no network, and a restored compiler stance.

`pytest --laws-out FILE` writes what the `law` fixture recorded in tests that passed as JSON, also under xdist.
"""

import ipaddress
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("quern", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("quern")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--laws-out", type=Path, help="write the laws' measured deviations here (JSON)")


class LawRecorder:
    """Collects the `law` records of passed tests in the controlling process and writes them at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.records += [value for key, value in report.user_properties if key == "law"]  # type: ignore[misc]

    def pytest_sessionfinish(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(self.records, key=lambda r: (r["test"], r["law"], str(r["deviation"])))
        self.path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--laws-out")
    is_worker = hasattr(config, "workerinput")  # xdist workers send their reports to the controller
    if path is not None and not is_worker:
        config.pluginmanager.register(LawRecorder(path), "law-recorder")


@pytest.fixture
def law(request: pytest.FixtureRequest) -> Callable[[str, float | int | str, str], None]:
    """law(name, deviation, bar) records a measured deviation. It asserts nothing; the test does that itself.

    Args of the returned function:
        name: The law, the same in every case that shares a row of the table.
        deviation: A number (also a NumPy or torch scalar), words such as "equal", or a bool: equal or not.
        bar: What the deviation is compared with, and its unit.
    """

    def record(name: str, deviation: float | int | str, bar: str) -> None:
        if isinstance(deviation, bool):
            deviation = "equal" if deviation else "differs"
        elif not isinstance(deviation, str):
            deviation = float(deviation)  # xdist cannot serialise a NumPy or torch scalar
        test = request.node.nodeid.split("::")[0]
        entry = {"law": name, "deviation": deviation, "bar": bar, "test": test}
        request.node.user_properties.append(("law", entry))

    return record


def _is_local(address: object) -> bool:
    if not isinstance(address, tuple):
        return True  # a Unix socket's path
    host = str(address[0])
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Refuse every connection to another machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if not _is_local(address):
            raise PermissionError(f"a test tried to connect to {address}; serve it from 127.0.0.1 instead")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(autouse=True)
def compiler_as_before() -> Iterator[None]:
    """Restore the compiler stance that a test changes: a command sets it for its whole process."""

    def stance() -> str:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # most tests never load it
        return dynamo._stance.stance if dynamo else "default"

    before = stance()
    yield
    if stance() != before:
        sys.modules["torch"].compiler.set_stance(before)
