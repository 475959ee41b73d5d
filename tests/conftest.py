"""Shared by every test: the recorder of the laws' deviations, reproducible hypothesis, no network, and a compiler
that is switched as each test found it.

`law(name, deviation, bar)` records what a law's test measured; it asserts nothing, the test does that itself.
`pytest --laws-out FILE` writes the records of the tests that passed as JSON, also when xdist spreads them.
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
    """Collects the `law` entries of passed tests on the controlling process and writes them at the end."""

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
    is_worker = hasattr(config, "workerinput")  # xdist's workers send their reports to the controller
    if path is not None and not is_worker:
        config.pluginmanager.register(LawRecorder(path), "law-recorder")


@pytest.fixture
def law(request: pytest.FixtureRequest) -> Callable[[str, float | int | str, str], None]:
    """law(name, deviation, bar): record a measured deviation (a number, or words such as "equal")."""

    def record(name: str, deviation: float | int | str, bar: str) -> None:
        if isinstance(deviation, bool):
            deviation = "equal" if deviation else "differs"
        elif not isinstance(deviation, str):
            deviation = float(deviation)  # also a NumPy or torch scalar, which a report could not carry
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
    """Refuse every connection that leaves this machine: the suite needs nothing but the package index."""
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
    """A command decides for its whole process whether anything is compiled; a test's, for that test."""

    def stance() -> str:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # most tests never load it
        return dynamo._stance.stance if dynamo else "default"

    before = stance()
    yield
    if stance() != before:
        sys.modules["torch"].compiler.set_stance(before)
