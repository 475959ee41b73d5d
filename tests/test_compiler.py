"""Whether PyTorch's compiler works here, and what is done side by side when it starts."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from quern import compiler

ROOT = Path(__file__).parents[1]
needs_compiler = pytest.mark.skipif(
    compiler.problem("cpu") is not None, reason="torch.compile does not work on this machine"
)


def test_mps_does_not_compile() -> None:
    assert compiler.problem("mps") is not None


FIRST_START = """
import json, sys, threading
import torch
from torch._inductor.async_compile import AsyncCompile
from quern import compiler

unasked = AsyncCompile._wait_futures
assert compiler.problem("cpu") is None
thread = next((t for t in threading.enumerate() if t.name == compiler.HEADER_THREAD), None)
left = []
patched = AsyncCompile._wait_futures

def watched(self, scope):
    patched(self, scope)
    left.extend(name for name, kernel in scope.items() if isinstance(kernel, compiler._Later))

AsyncCompile._wait_futures = watched
lowered = []
import torch._inductor.compile_fx as compile_fx
codegen = compile_fx.fx_codegen_and_compile

def counted(*arguments, **keywords):
    lowered.append("backward" if keywords.get("is_backward") else "forward")
    return codegen(*arguments, **keywords)

compile_fx.fx_codegen_and_compile = counted
x = torch.arange(64.0, requires_grad=True)
y = torch.compile(lambda x: (torch.sin(x) * x).sum())(x)
before = list(lowered)
y.backward()
right = bool(torch.allclose(x.grad, torch.sin(x) + x * torch.cos(x), atol=1e-4))
if thread is not None:
    thread.join()
print(json.dumps({"hooked": unasked is not patched, "left": len(left), "before backward": before, "right": right}))
"""


@needs_compiler
def test_a_first_start_builds_one_header_and_waits_for_kernels_when_they_are_called(tmp_path: Path) -> None:
    """Both threads must ask for the same header: a second one, for other flags, would take five seconds more."""
    environment = os.environ | {
        "TMPDIR": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", FIRST_START], capture_output=True, text=True, timeout=250, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["hooked"] and said["left"] >= 2 and said["right"], said
    assert said["before backward"] == ["forward", "backward"], said
    assert len(list(tmp_path.rglob("*.gch"))) == 1
    assert len(list((tmp_path / "cache").glob("quern-*"))) == 1


@needs_compiler
def test_what_was_compiled_once_is_only_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpp_builder import CppBuilder

    compiler._load_a_library()
    monkeypatch.setattr(CppBuilder, "build", lambda self: pytest.fail("compiled again"))
    compiler._load_a_library()


@needs_compiler
def test_another_pytorch_is_probed_by_compiling_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("not in this version")

    monkeypatch.setattr(compiler, "_find_tools", missing)
    assert compiler.problem.__wrapped__("cpu") is None
    monkeypatch.setattr(compiler, "_probe", lambda x: x.no_such_method())
    assert "no_such_method" in (compiler.problem.__wrapped__("cpu") or "")


def test_a_kernel_takes_its_place_at_the_first_call() -> None:
    future: Future = Future()
    scope: dict[str, Any] = {}
    later = scope["kernel"] = compiler._Later(scope, "kernel", future)
    future.set_result(torch.add)
    assert later(torch.ones(()), torch.ones(())).item() == 2
    assert scope["kernel"] is torch.add and later.__name__ == "add"


def test_a_kernel_that_failed_to_compile_says_so_at_the_call() -> None:
    future: Future = Future()
    future.set_exception(RuntimeError("g++ failed"))
    with pytest.raises(RuntimeError, match="g\\+\\+ failed"):
        compiler._Later({}, "kernel", future)()
