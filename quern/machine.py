"""The machine a run is on: device, compute dtype, threads, and what it was found able to do.

`detect` is called once, by the command line; everything else receives the frozen `Machine`. This is the only file
that reads the environment. It is not a mesh: how many processes there are is `mesh.py`'s business.

Abilities are probed by running something tiny, never by a version number: a bf16 matmul is timed against an fp32 one,
and a one-line kernel is compiled to see whether a C++ compiler (or Triton) is there and works (compiler.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from quern import compiler


class Attention(Protocol):
    """How attention is computed here: one path or a choice among several (kernels/attention/autotune.py)."""

    def __call__(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        mask: Any,
        scale: float | None = None,
    ) -> torch.Tensor:
        """mask: a `kernels.attention.MaskSpec` → (B, T, H, E)."""
        ...

    def prepare(self, mask: Any, T: int, device: torch.device) -> Any:
        """The mask with what is worked out once for all layers."""
        ...


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROBE_SECONDS = 0.05
HEAP_BYTES = 2**33
"""Addresses that may get large pages; memory is only taken as it is used."""


@dataclass(frozen=True)
class Machine:
    """device: where tensors live; dtype: the compute dtype (parameters and activations); compile: whether
    torch.compile is used; threads: intra-op CPU threads; notes: one line for each fallback, to be shown to the user;
    attention: how it is computed; None until `select_attention` (kernels/attention/autotune.py) has chosen a path."""

    device: torch.device
    dtype: torch.dtype
    compile: bool
    threads: int
    notes: tuple[str, ...] = ()
    attention: Attention | None = None

    def generator(self, seed: int) -> torch.Generator:
        """A generator on the CPU, whatever the device, so that initial weights don't depend on the hardware."""
        return torch.Generator(device="cpu").manual_seed(seed)

    def synchronize(self) -> None:
        """Waits for the device, so that a clock read afterwards means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def describe(self) -> dict[str, object]:
        """What a record needs to say about where its numbers were measured (JSON types only)."""
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
    """Looks at the machine and decides; every argument overrides one decision.

    device: "cpu", "cuda" or "mps"; dtype: "bf16" or "fp32"; threads: CPU threads (default: what torch finds).
    Raises ValueError, naming the valid values, when an override makes no sense here.
    """
    notes: list[str] = []
    chosen = _device(device)
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        torch.set_num_threads(threads)
    if chosen.type == "cpu":
        keep_freed_memory()
        os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes that compile for GPUs, and take seconds to start
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"unknown dtype '{dtype}': use one of {', '.join(DTYPES)}")
    compute = DTYPES[dtype] if dtype else _compute_dtype(chosen)
    if compile and (problem := compiler.problem(chosen.type)):
        notes.append(f"torch.compile does not work here ({problem}): running eagerly, which is slower")
        compile = False
    torch.compiler.set_stance("default" if compile else "force_eager")
    return Machine(chosen, compute, compile, torch.get_num_threads(), tuple(notes))


def _device(name: str | None) -> torch.device:
    available = ["cpu"]
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if name is None:
        return torch.device(available[0])
    if name not in available:
        raise ValueError(f"device '{name}' is not available here: use one of {', '.join(available)}")
    return torch.device(name)


def _compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 on CUDA from sm80 on, and on CPUs where a bf16 matmul is measured to be clearly faster than fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float32
    if device.type == "cpu":
        narrow, wide = matmul_seconds((torch.bfloat16, torch.float32))
        return torch.bfloat16 if narrow * 1.5 < wide else torch.float32
    return torch.float32


def matmul_seconds(dtypes: Sequence[torch.dtype], size: int = 512, rounds: int = 20) -> list[float]:
    """The best wall time in seconds of a (size, size) by (size, size) matmul on the CPU, for each dtype.

    In turns, and for longer than the scheduler lets another process have a core: a process that has just started may
    wait that long for its second thread, and one dtype would pay for it.
    """
    operands = [torch.ones(size, size, dtype=dtype) for dtype in dtypes]
    best, begin = [float("inf")] * len(operands), time.perf_counter()
    while rounds > 0 or time.perf_counter() - begin < PROBE_SECONDS:
        rounds -= 1
        for number, a in enumerate(operands):
            start = time.perf_counter()
            torch.mm(a, a)
            best[number] = min(best[number], time.perf_counter() - start)
    return best


@cache
def keep_freed_memory() -> None:
    """Tells glibc, once, to keep and reuse large freed blocks instead of returning them to the kernel each time, and
    lets the kernel back `HEAP_BYTES` of them with pages of 2 MiB instead of 4 KiB, where it does so on request.

    By default every tensor over 128 KiB is mapped afresh and its pages are zeroed on first touch; for activations of
    a few MiB that costs more than the matmul that fills them. Large pages took 3 to 5 % off the processor time of a
    training step where it was measured. On other C libraries this does nothing.
    """
    if sys.platform != "linux":
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
        _large_pages(libc)


def _large_pages(libc: ctypes.CDLL) -> None:
    """The heap grows once, by addresses only, so that what is asked of it holds for all that will be allocated."""
    MADV_HUGEPAGE, size = 14, 2**21
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free(libc.malloc(HEAP_BYTES))
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            if line.endswith("[heap]\n"):
                first, last = (int(address, 16) for address in line.split()[0].split("-"))
                begin, end = -(-first // size) * size, last // size * size
                if begin < end:
                    libc.madvise(begin, end - begin, MADV_HUGEPAGE)


def processor_name(device: torch.device) -> str:
    """The processor's marketing name, as the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.processor() or platform.machine()


def environment() -> Mapping[str, str]:
    """The process's environment, read here and nowhere else."""
    return os.environ


def set_child_env(values: Mapping[str, str]) -> None:
    """Puts values into the environment of the processes that this one will start."""
    os.environ.update(values)


def on_terminal() -> bool:
    """Whether progress may be drawn (a bar) or must be printed (plain lines)."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def measure_peak_flops(machine: Machine, size: int = 2048, repeats: int = 12, seconds: float = 1.0) -> float:
    """The machine's own matmul peak in FLOP/s in the compute dtype: the best of a few large square products.

    Args:
        machine: What computes.
        size: Rows and columns of the matrices.
        repeats: Products to time at most.
        seconds: No further product begins after this time.
    """
    a = torch.randn(size, size, dtype=torch.float32).to(machine.device, machine.dtype)
    best, until = float("inf"), time.perf_counter() + seconds
    for done in range(repeats):
        if done >= 2 and time.perf_counter() > until:
            break
        machine.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        machine.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
