"""Two processes of two devices each equal one device; a refusal ends both; the twin imports no torch, and keeps freed
memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quern.runs.run_dir import RunDir
from quern.runs.run_lock import run_lock
from tests.support.jax_process import Grug, environment
from tests.support.line_server import ROOT
from tests.support.ranks import free_port


def together(commands: list[list[str]], devices: int, tmp_path: Path, code: int) -> list[str]:
    """Runs Python processes that end with this code; returns their outputs."""
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(tmp_path / f"compiled-{i}", devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, command in enumerate(commands)
    ]
    answers = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [code] * len(started), answers
    return answers


def test_two_processes_are_one(grug: Grug, tmp_path: Path) -> None:
    words = ["-m", "tests.grug.two_processes", f"127.0.0.1:{free_port()}"]
    answers = together([[*words, str(i), str(tmp_path / "checkpoints")] for i in range(2)], 2, tmp_path, 0)
    found = [json.loads(next(line for line in out.splitlines() if line.startswith("{"))) for out in answers]
    assert found[0] == found[1]
    assert found[0]["named alike"] == "name-0"
    assert found[0]["refusal"] == "process 0 found no text"
    assert found[0]["one raised"] and not found[0]["none raised"]
    one = grug("two_processes:expected", folder=str(tmp_path / "checkpoints"))
    gaps = [abs(a - b) / abs(b) for a, b in zip(found[0]["losses"], one["losses"], strict=True)]
    assert max(gaps) <= 1e-5, gaps
    assert one["step"] == 1 and one["weights"] <= 1e-5


@pytest.mark.campaign
def test_a_refusal_of_process_0_ends_every_process(tmp_path: Path) -> None:
    out, where = tmp_path / "out", ["--processes.coordinator", f"127.0.0.1:{free_port()}", "--processes.count", "2"]
    words = ["-m", "quern.cli.main", "grug", "train", "--out", str(out), "--run", "busy", "--dtype", "fp32", *where]
    with run_lock(RunDir(out, "busy"), "another command"):
        answers = together([[*words, "--processes.id", str(i)] for i in range(2)], 1, tmp_path, 1)
    assert all("run 'busy' is in use by process" in answer for answer in answers), answers


def test_importing_the_twin_imports_no_torch() -> None:
    modules = sorted(
        f"quern.grug.{path.stem}" for path in (ROOT / "quern" / "grug").glob("*.py") if path.stem != "__init__"
    )
    assert len(modules) >= 8
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    assert run(code + "print('torch' in sys.modules)") == ["False"]


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


FAULTS = """
import ctypes, os, resource, threading
from quern.grug.mesh import keep_freed_memory
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def fill():
    block = libc.malloc(1 << 26)
    libc.memset(block, 1, 1 << 26)
    libc.free(block)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if child := os.fork():
    os.waitpid(child, 0)
    keep_freed_memory()
faults()
print(faults(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these settings")
def test_a_freed_block_costs_no_pages_the_second_time() -> None:
    """In every thread; by the kernel's count of page faults."""
    by_default, kept = map(int, run(FAULTS))
    if by_default < 2**26 // 4096 / 2:
        pytest.skip("this system hands out huge pages, or keeps memory by itself")
    assert kept < 2**26 // 4096 / 100
