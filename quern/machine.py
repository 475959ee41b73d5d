"""The machine of a run: device, compute dtype, threads, and whether torch.compile works.

The command line calls `detect` once; everything else receives the frozen `Machine`. `detect` compiles a small function,
and on a CPU times a bf16 matmul against an fp32 one; on a GPU the compute capability decides about bf16. A CPU without
instructions for bf16 multiplies it a hundred times as slowly as fp32: there `--dtype bf16` rounds as asked, and the
products themselves are computed in fp32.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from quern.process import environment, number_of, set_child_env  # isort: skip  # before PyTorch, which reads it

import torch
import torch.library

from quern import compiler
from quern.process import peak_resident, reset_peak_resident


class Attention(Protocol):
    """Computes attention: one kernel, or a choice among several (kernels/attention/autotune.py)."""

    @property
    def attend(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, float | None], torch.Tensor]:
        """(q, k, v, mask, scale) → (B, T, H, E). mask: a `kernels.attention.attend.MaskSpec`."""
        ...


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROBE_SECONDS = 0.05
HEAP_BYTES = 2**33
CPUINFO = Path("/proc/cpuinfo")
WIDEST = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # instructions of x86 for matrix products, the widest first


@dataclass(frozen=True)
class Machine:
    """The hardware of a run, and how it is used."""

    device: torch.device
    dtype: torch.dtype  # dtype of parameters and activations
    compile: bool  # whether torch.compile is used
    threads: int  # CPU threads
    notes: tuple[str, ...] = ()  # a line for the user for each fallback
    attention: Attention | None = None  # until `select_attention` (kernels/attention/autotune.py) has chosen a kernel

    def read_later(self, tensor: torch.Tensor) -> Callable[[], list[Any]]:
        """Starts to copy a tensor to the host. Returns a function that waits for it and returns its `tolist`."""
        if self.device.type != "cuda":
            return tensor.tolist
        copied = tensor.to("cpu", non_blocking=True)  # pinned
        arrived = torch.cuda.current_stream(self.device).record_event()

        def read() -> list[Any]:
            arrived.synchronize()
            return copied.tolist()

        return read

    def synchronize(self) -> None:
        """Waits until the device has finished, before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def describe(self) -> dict[str, object]:
        """Returns the facts for a record about where its numbers were measured (JSON types only)."""
        return {
            "processor": processor_name(self.device),
            "device": str(self.device.type),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": self.threads,
            "compiled": self.compile,
            "attention": "not chosen" if self.attention is None else str(self.attention),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
        }


def detect(
    device: str | None = None, dtype: str | None = None, compile: bool = True, threads: int | None = None
) -> Machine:
    """Decides how to use this machine. Every argument overrides one decision: device "cpu", "cuda" or "mps", dtype
    "bf16" or "fp32", torch.compile where it works, and the CPU threads. A rank takes the GPU of its number. Raises
    ValueError, which says what is valid, for a device that is not here."""
    notes: list[str] = []
    chosen = _device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    if chosen.type == "cpu":
        keep_freed_memory()
        # These processes compile for GPUs only, and take seconds to start.
        set_child_env({"TORCH_WARM_POOL": "0", **environment()})
    elif chosen.type == "cuda":
        # torch would prefer cuDNN on Hopper, which plans for half a second for each new length: at every 16th token of
        # a reply, and for every prompt. `attend_cudnn` asks for it.
        torch.backends.cuda.enable_cudnn_sdp(False)
    compute = DTYPES[dtype] if dtype else _compute_dtype(chosen)
    if chosen.type == "cpu" and compute == torch.bfloat16 and hopeless_in_bf16():
        multiply_bf16_in_fp32()
        notes.append("this CPU has no instructions for bf16: products are computed in fp32 and rounded to bf16")
    if compile and (problem := compiler.problem(chosen.type)):
        notes.append(f"torch.compile does not work here ({problem}): running eagerly, which is slower")
        compile = False
    compiler.set_eager(not compile)
    return Machine(chosen, compute, compile, torch.get_num_threads(), tuple(notes))


def _device(name: str | None) -> torch.device:
    usable = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available(), "cpu": True}
    available = [kind for kind, here in usable.items() if here]
    if name not in (None, *available):
        raise ValueError(f"device '{name}' is not available here: use one of {', '.join(available)}")
    chosen = torch.device(name or available[0])
    if chosen.type == "cuda" and environment().get("LOCAL_RANK"):
        if (rank := number_of("LOCAL_RANK", 0)) >= (count := torch.cuda.device_count()):
            raise ValueError(f"every rank needs a GPU, and there are {count}: give fewer --ranks, or --device cpu")
        torch.cuda.set_device(rank)
    return chosen


def _compute_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16 on CUDA from sm80 on, and on CPUs where a bf16 matmul is measurably faster than fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float32
    if device.type == "cpu" and not hopeless_in_bf16():
        return torch.bfloat16 if relative_bf16_time() * 1.5 < 1 else torch.float32
    return torch.float32


@cache
def hopeless_in_bf16() -> bool:
    """Returns whether a small bf16 matmul takes eight times as long as an fp32 one on the CPU: a large one, which
    decides between the two, would take seconds."""
    return relative_bf16_time(size=128, rounds=8, seconds=0) > 8


@cache
def multiply_bf16_in_fp32() -> torch.library.Library:
    """Computes the CPU's bf16 matrix products in fp32 from now on, and rounds the results to bf16, as processors with
    bf16 instructions do; only the order of the sums differs. Returns the library that holds the overrides."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "mm.out", "addmm", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm.out"):
        _override(library, name)
    return library


def _override(library: torch.library.Library, name: str) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def multiply(keys: Any, *args: Any, out: torch.Tensor | None = None, **scales: Any) -> torch.Tensor:
        into = {} if out is None else {"out": out}
        if all(one.dtype != torch.bfloat16 for one in args if isinstance(one, torch.Tensor)):
            return kernel.call_boxed(keys, *args, **scales, **into)
        wide = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
        if out is None:
            return kernel.call_boxed(keys, *wide, **scales).bfloat16()
        return out.copy_(kernel.call_boxed(keys, *wide, **scales, out=torch.empty_like(out, dtype=torch.float32)))

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that a kernel is overridden
        library.impl(name, multiply, "CPU", with_keyset=True)


def relative_bf16_time(size: int = 512, rounds: int = 20, seconds: float = PROBE_SECONDS) -> float:
    """The best wall time of a (size, size) matmul on the CPU in bf16, divided by that in fp32. They alternate for at
    least `rounds` and `seconds`, longer than a time slice of the scheduler: else only one of them might wait for its
    thread."""
    operands = [torch.ones(size, size, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    best, begin = [float("inf")] * len(operands), time.perf_counter()
    while rounds > 0 or time.perf_counter() - begin < seconds:
        rounds -= 1
        for number, a in enumerate(operands):
            start = time.perf_counter()
            torch.mm(a, a)
            best[number] = min(best[number], time.perf_counter() - start)
    return best[0] / best[1]


@cache
def keep_freed_memory() -> None:
    """Tells glibc to reuse large freed blocks, and Linux to back `HEAP_BYTES` of the heap with pages of 2 MiB.

    By default glibc maps every tensor over 128 KiB separately, and the kernel zeroes its pages of 4 KiB on first use.
    For activations of a few MiB that takes longer than the matmul that fills them. Large pages take a tenth off the
    processor time of a small fp32 training step. Other C libraries are left alone.
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX, MADV_HUGEPAGE, PAGE_BYTES = -1, -4, 14, 4096
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
        libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if block := libc.malloc(HEAP_BYTES):  # reserves addresses; memory is taken when it is used
            libc.madvise(block // PAGE_BYTES * PAGE_BYTES, HEAP_BYTES, MADV_HUGEPAGE)
            libc.free(block)  # the heap keeps the addresses


def reset_peak_memory(device: torch.device) -> bool:
    """Begins `peak_memory` again. Returns whether it can: on a CPU without Linux it counts from the process's start."""
    if device.type != "cuda":
        return reset_peak_resident()
    torch.cuda.reset_peak_memory_stats()
    return True


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes held: on CUDA of device memory, else of physical memory by this process."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident()


def processor_name(device: torch.device) -> str:
    """Returns the processor's name, as the system reports it. On Linux, the name of an x86 CPU also tells the widest
    instructions that it shows: a virtual machine may hide some, and results differ with them."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        about = dict(re.findall(r"^([\w ]+?)\s*: (.+)$", CPUINFO.read_text(encoding="utf-8"), re.MULTILINE))
        if "model name" in about:
            has = set(about.get("flags", "").split())
            widest = next((f" with {name}" for name in WIDEST if name in has), "")
            return f"{about['model name'].strip()}{widest}, {os.cpu_count()} cores"
    return platform.processor() or platform.machine()


def machine_flags(machine: Machine) -> dict[str, Any]:
    """Returns the arguments with which `detect` finds the same machine in a child."""
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[str(machine.dtype).removeprefix("torch.")]
    return {"device": machine.device.type, "dtype": dtype, "compile": machine.compile, "threads": machine.threads}


def worker_variables(machine: Machine) -> Callable[[int], dict[str, str]]:
    """Environment variables of a worker process, by its number from 0: on GPUs, each worker sees one of them."""
    if machine.device.type != "cuda":
        return lambda worker: {}
    visible = environment().get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return lambda worker: {"CUDA_VISIBLE_DEVICES": devices[worker % len(devices)]}


def measure_peak_flops(machine: Machine, size: int = 2048) -> float:
    """The matmul peak in FLOP/s in the compute dtype: the best of a few (size, size) products."""
    a = torch.randn(size, size, dtype=torch.float32).to(machine.device, machine.dtype)
    best, until = float("inf"), time.perf_counter() + 1.0
    for done in range(12):
        if done >= 2 and time.perf_counter() > until:
            break
        machine.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        machine.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
