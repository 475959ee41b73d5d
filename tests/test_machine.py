"""The decisions and notes of `detect`. A real process without a compiler tests the fallback."""

import json
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from quern import compiler
from quern.machine import Machine, detect, hopeless_in_bf16, processor_name, relative_bf16_time
from tests.support.line_server import ENVIRONMENT, ROOT


def test_every_decision_can_be_overridden() -> None:
    machine = detect("cpu", "bf16", compile=False, threads=2)
    assert machine == Machine(torch.device("cpu"), torch.bfloat16, False, 2, machine.notes)
    assert torch.get_num_threads() == 2
    assert detect("cpu", "fp32", compile=False, threads=1).dtype == torch.float32


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    cudnn: list[bool] = []
    for name, value in ("is_available", True), ("device_count", 2), ("get_device_capability", (9, 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert detect("cpu", "fp32", compile=False).device.type == "cpu" and taken == cudnn == []
    assert detect("cuda", compile=False).dtype == torch.bfloat16 and taken == [1]
    assert cudnn == [False]  # which is for paths of attention that name it
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="every rank needs a GPU, and there are 2: give fewer --ranks, or --device"):
        detect("cuda", compile=False)


def test_bf16_is_chosen_on_a_cpu_only_where_it_is_measured_faster() -> None:
    """The decision is a measurement. Where it is clear on this machine, `detect` must agree with it."""
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has more than a CPU")
    ratios = [1 / relative_bf16_time(rounds=2) for _ in range(3)]
    chosen = detect(compile=False).dtype
    if min(ratios) > 2:
        assert chosen == torch.bfloat16
    elif max(ratios) < 1:
        assert chosen == torch.float32


def test_a_cpu_without_bf16_instructions_is_known_by_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of size 512 takes a quarter of a second there, and every command would multiply twenty of them."""
    sizes = []

    def slow_in_bf16(a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == torch.bfloat16:
            sizes.append(len(a))
            time.sleep(0.002)

    monkeypatch.setattr(torch, "mm", slow_in_bf16)
    hopeless_in_bf16.cache_clear()
    try:
        assert detect("cpu", compile=False, threads=1).dtype == torch.float32
    finally:
        hopeless_in_bf16.cache_clear()
    assert sizes == [128] * 8


IN_FP32 = """
import warnings
import torch
from quern import machine
machine.hopeless_in_bf16 = lambda: True
with warnings.catch_warnings(action="error"):
    (note,) = machine.detect("cpu", "bf16", compile=False).notes
assert "no instructions for bf16" in note
torch.manual_seed(0)
a, b = (torch.randn(3, 16, 16).bfloat16().requires_grad_() for _ in range(2))
wide = a.detach().float(), b.detach().float()
for product in (torch.bmm, lambda x, y: x[0] @ y[0], lambda x, y: torch.baddbmm(x, x, y, beta=0.5, alpha=2),
                lambda x, y: torch.addmm(x[1], x[0], y[0], alpha=3)):
    exact = product(*wide)
    assert exact.dtype == torch.float32, exact.dtype
    assert torch.equal(product(a, b), exact.bfloat16())
into = torch.full_like(a, torch.nan)
with torch.no_grad():
    torch.baddbmm(into, a, b, beta=0, out=into)  # what `into` held is not read
    assert torch.equal(into, torch.bmm(*wide).bfloat16())
(a[0] @ b[0]).backward(torch.ones(16, 16, dtype=torch.bfloat16))
assert torch.equal(a.grad[0], (torch.ones(16, 16) @ wide[1][0].T).bfloat16())
for name, terms in {"mm": 2, "addmm": 3, "bmm": 2, "baddbmm": 3}.items():
    one = (a if "bmm" in name else a[0]).detach()
    for how in ({}, {"out": torch.empty_like(one)}):
        with torch.profiler.profile() as seen:
            getattr(torch, name)(*[one] * terms, **how)
        assert any(event.key == "aten::to" for event in seen.key_averages()), name  # PyTorch's own casts nothing
wide = torch.randn(4, 4)
assert torch.equal(torch.mm(wide, wide), wide @ wide) and (wide @ wide).dtype == torch.float32
"""


def test_bf16_products_in_fp32_are_those_products_rounded() -> None:
    done = subprocess.run([sys.executable, "-c", IN_FP32], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_cpu_is_named_with_instructions_that_change_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two virtual machines of one processor, one of which hides its AMX, differ by .0003 bits per byte on rung 0."""
    monkeypatch.setattr("quern.machine.CPUINFO", tmp_path / "cpuinfo")
    names = []
    for flags in ("fpu avx2 avx512f avx512_bf16 amx_bf16", "fpu avx2 avx512f avx512_bf16", "fpu"):
        cores = "".join(f"processor\t: {i}\nmodel name\t: Xeon: 8\nflags\t\t: {flags}\npower:\n\n" for i in (0, 1))
        (tmp_path / "cpuinfo").write_text(cores)
        names.append(processor_name(torch.device("cpu")).rsplit(",", 1)[0])
    assert names == ["Xeon: 8 with amx_bf16", "Xeon: 8 with avx512_bf16", "Xeon: 8"]


LARGE_PAGES = """
import torch
from quern.machine import keep_freed_memory
keep_freed_memory()
address = torch.ones(2**24).data_ptr()
inside = False
for line in open("/proc/self/smaps"):
    first, _, last = line.split()[0].partition("-")
    if last:
        inside = int(first, 16) <= address < int(last, 16)
    elif inside and line.startswith("VmFlags:"):
        print("hg" in line.split())
"""


def test_tensors_are_in_memory_that_may_have_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no large pages on request")
    command = [sys.executable, "-c", LARGE_PAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr


def test_without_compile_nothing_is_compiled_not_even_what_is_decorated() -> None:
    calls = []

    @torch.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    detect("cpu", "fp32", compile=False, threads=1)
    assert double(torch.ones(2)).tolist() == [2, 2] and calls == []
    compiler.set_eager(False)
    assert double(torch.ones(2)).tolist() == [2, 2] and len(calls) == 1


BROKEN_COMPILER = """
import json
import torch
from quern.machine import detect
from quern.kernels.cross_entropy import cross_entropy
from quern.kernels.softcap import TanhCap
machine = detect("cpu", "fp32", compile=True, threads=1)
x, w = torch.ones(4, 8, requires_grad=True), torch.ones(5, 8, requires_grad=True)
loss, _ = cross_entropy(x, w, torch.zeros(4, dtype=torch.long), torch.ones(4), TanhCap(15.0))
loss.backward()
print(json.dumps([machine.compile, machine.notes, x.grad is not None]))
"""


def test_without_a_compiler_it_says_so_in_one_line_and_runs_eagerly(tmp_path: Path) -> None:
    absent = {"CXX": str(tmp_path / "no-such-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", BROKEN_COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=ENVIRONMENT | absent, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    compiles, notes, has_gradient = json.loads(done.stdout.splitlines()[-1])
    assert compiles is False and has_gradient is True
    (note,) = notes
    assert note.startswith("torch.compile does not work here (") and note.endswith("which is slower")
    assert "\n" not in note
    said = done.stderr.splitlines()  # on a slow machine, what it waits for
    assert [line for line in said if line and not line.startswith("waiting for PyTorch's compiler")] == []


def test_a_probe_that_fails_returns_the_first_line_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_probe", lambda x: x.no_such_method())
    found = compiler.problem.__wrapped__("cpu")
    assert found is not None and "no_such_method" in found and "\n" not in found and len(found) <= 120


def test_a_thread_without_the_compiler_leaves_the_others_as_they_were() -> None:
    entered, left, seen = Event(), Event(), []

    def other() -> None:
        seen.append(compiler.is_eager())
        with compiler.eager():
            entered.set()
            left.wait(10)
            seen.append(compiler.is_eager())
        seen.append(compiler.is_eager())

    with compiler.eager():
        thread = Thread(target=other)
        thread.start()
        assert entered.wait(10)
    assert not compiler.is_eager()
    left.set()
    thread.join(10)
    assert seen == [False, True, False] and not compiler.is_eager()
