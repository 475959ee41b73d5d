"""Shared by every test: the `law` fixture, reproducible hypothesis, no network, the compiler and the threads as before,
the server processes that several files use, and the order of files under xdist.

`pytest --junitxml FILE` also writes what the `law` fixture recorded, as properties of the tests.
"""

import gc
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.laws.table import Law
from tests.support import command, faulty_ranks, interpreter, jax_process, llama_cpp
from tests.support import ranks as ranks_process
from tests.support.small_text import write_text

if TYPE_CHECKING:
    from tests.support.run_bench import Bench

# Models are tiny: a second thread only waits, and where cores are shared, for most of the time. torch reads it later.
os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("quern", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("quern")


@pytest.fixture
def eager() -> Iterator[None]:
    """Turns the compiler off, as `machine.detect(compile=False)` does: nothing is compiled, not even the loss."""
    from quern import compiler

    with compiler.eager():
        yield


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> command.Told:
    """Runs commands of `quern`: tests/support/command.py."""
    return command.runner(capsys)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tmp_path`, and it is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Order under xdist -------------------------------------------------------------------------------------------


SERVERS = ("grug", "faulty_server", "bench", "browser", "llama")
"""Fixtures that start a process. All tests that use one run in one worker, so it starts once. `ranks` and `interpreted`
start one in each worker that needs it."""
SLOWEST_FIRST = (
    "grug",
    "bench",
    "faulty_server",
    "tests/laws/test_damage_law.py",
    "tests/contracts/test_experiments.py",
    "tests/train/test_launch.py",
    "tests/serve/test_replicas.py",
    "tests/serve/test_load.py",
    "tests/stages/test_run_ownership.py",
    "tests/generate/sandbox/test_sandbox.py",
    "tests/estimate/test_memory.py",
    "tests/laws/test_ranks_law.py",
    "tests/bench/test_bench.py",
    "tests/laws/test_flash_law.py",
    "tests/laws/test_rope_law.py",
    "tests/laws/test_cross_entropy_law.py",
    "tests/laws/test_tensor_law.py",
    "tests/laws/test_fp8_law.py",
    "tests/train/test_compilation.py",
    "tests/generate/test_compiled.py",
    "tests/stages/test_run_all.py",
)
"""The others follow in their order."""

# A shell without job control lets background jobs ignore SIGINT, and nohup SIGHUP: what the tests start would inherit
# that. A handler ends with `exec`.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def group_of(item: pytest.Item) -> str:
    """Returns the server that a test uses, or its file."""
    fixtures = getattr(item, "fixturenames", ())
    return next((name for name in SERVERS if name in fixtures), item.nodeid.split("::")[0])


@pytest.hookimpl(tryfirst=True)  # before xdist writes the group's name into the test's id
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, a worker runs all tests of a group, and the slowest groups start first."""
    if not getattr(config.option, "loadgroup", False):  # which xdist sets in its workers
        return
    place = {name: number for number, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: place.get(group_of(item), len(place)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


def pytest_configure() -> None:
    gc.disable()  # until all tests are collected: an eighth of that time


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freezes the objects that exist, so searches for garbage skip them."""
    gc.freeze()
    gc.enable()
    if "quern.compiler" in sys.modules and sys.modules["quern.compiler"].is_eager():
        raise pytest.UsageError("a test file turns the compiler off for all others while it is imported")


# Servers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def grug(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jax_process.Grug]:
    """Calls functions in JAX's process: tests/support/jax_process.py."""
    with jax_process.running(tmp_path_factory.mktemp("grug")) as call:
        yield call


@pytest.fixture(scope="session")
def ranks() -> Iterator[ranks_process.Ranks]:
    """Calls functions on several ranks: tests/support/ranks.py."""
    with ranks_process.Ranks() as server:
        yield server


@pytest.fixture(scope="session")
def interpreted() -> Iterator[interpreter.Interpreted]:
    """Calls functions in a process that interprets Triton kernels: tests/support/interpreter.py."""
    with interpreter.running() as call:
        yield call


@pytest.fixture(scope="session")
def faulty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[faulty_ranks.FaultyRanks]:
    """Runs commands on ranks with faults, in a folder with a small text: tests/support/faulty_ranks.py."""
    folder = tmp_path_factory.mktemp("faulty")
    write_text(folder)
    with faulty_ranks.FaultyRanks(folder) as server:
        yield server


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Bench"]:
    """Runs commands that can be killed at any event: tests/support/run_bench.py."""
    from tests.support.run_bench import Bench  # imports torch, which many tests do not need

    with Bench(tmp_path_factory.mktemp("bench")) as made:
        yield made


@pytest.fixture(scope="session")
def llama(request: pytest.FixtureRequest) -> Iterator[llama_cpp.LlamaCpp]:
    """llama.cpp, which npm installs: tests/support/llama_cpp.py."""
    with llama_cpp.LlamaCpp(request.config.cache.mkdir("npm")) as oracle:
        yield oracle


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of two workers whose only machine is this one."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


# Laws --------------------------------------------------------------------------------------------------------


@pytest.fixture
def law(request: pytest.FixtureRequest) -> Law:
    """law(name, deviation, most, unit) records a measured deviation, and asserts that it is not above the bar.

    Args of the returned function:
        name: The law, the same in every case that shares a row of the table.
        deviation: A number (also a NumPy or torch scalar), a list of what differs, or a bool: equal or not. By default
            the test has seen that all is equal.
        most: The bar.
        unit: Of deviation and bar, or words for a bar of 0.
        bar: Words for a bar of another kind, which the test asserts itself.
    """

    def record(name: str, deviation: Any = True, most: float = 0, unit: str = "", bar: str = "") -> None:
        shown = bar or (f"≤ {most:.2g} {unit}".strip().replace("e-0", "e-") if most else unit or "0")
        if isinstance(deviation, bool):
            holds, number, shown = deviation, "equal" if deviation else "differs", unit or "equal"
        elif isinstance(deviation, str):
            holds, number = True, deviation
        else:  # a NumPy or torch scalar is no JSON
            number = float(len(deviation) if isinstance(deviation, list) else deviation)
            holds = number <= most
        entry = {"law": name, "deviation": number, "bar": shown, "test": request.node.nodeid.split("::")[0]}
        request.node.user_properties.append(("law", json.dumps(entry)))
        assert bar or holds, f"{name}: {deviation}, not {shown}"

    return record


def _is_local(address: object) -> bool:
    """Whether it is a Unix socket's path, or a host on this machine."""
    return not isinstance(address, tuple) or re.fullmatch(r"|localhost|127[.][0-9.]+|::1", str(address[0])) is not None


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Refuse every connection to another machine. Child processes are not guarded: npm installs llama.cpp."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if not _is_local(address):
            raise PermissionError(f"a test tried to connect to {address}; serve it from 127.0.0.1 instead")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(scope="session", autouse=True)
def peak_not_measured() -> Iterator[None]:
    """The machine's peak, which only the column `mfu` shows, takes each training run a second to measure."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:  # else no test imports it before it runs
            patch.setattr("quern.stages.session.measure_peak_flops", lambda machine: 1e12)
        yield


def _machine_as_before() -> Iterator[None]:
    """Compile, or not, and on as many threads as before: a command sets both for its whole process."""
    # Not is_eager(), which is this thread's: a fixture inside `eager` would leave that to all tests after it.
    before = "quern.compiler" in sys.modules and None in sys.modules["quern.compiler"]._eager
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if "quern.compiler" in sys.modules:
        sys.modules["quern.compiler"].set_eager(before)
    if threads is not None:
        sys.modules["torch"].set_num_threads(threads)


machine_as_before = pytest.fixture(autouse=True)(_machine_as_before)
machine_as_before_the_file = pytest.fixture(autouse=True, scope="module")(_machine_as_before)
