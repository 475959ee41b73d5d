"""PyTorch's compiler on this machine: whether it works, and how it starts sooner on a CPU.

A first start compiles a dozen graphs into some twenty small C++ files. What takes long is done side by side: while this
process imports the compiler, a thread learns the processor's instructions and tries a kernel; the header that all files
include (5 seconds) is precompiled while the model is built and traced; backward passes are lowered together with
forward passes, and files are compiled while the next graphs are traced, each being waited for where it is first called.
Where a version of PyTorch lacks what this hooks into, it starts as PyTorch does.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

HEADER_THREAD = "precompiled header"
PROBE = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* x) {
#if INDUCTOR_USE_VECTOR_TYPES()
    at::vec::Vectorized<float>(1.0f).store(x);
#else
    x[0] = 1.0f;
#endif
}
"""


@cache
def problem(device_type: str) -> str | None:
    """None when torch.compile works on this device, else the reason in a few words."""
    if device_type == "mps":
        return "not supported by PyTorch on MPS for this model"
    # Read when torch._inductor is imported, which is why it is set before that.
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    _choose_code()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if device_type != "cpu" or not _start():
                torch.compile(_probe, dynamic=False)(torch.ones(8, device=device_type))
    except Exception as error:  # whatever the toolchain raises: a missing compiler, a broken header, no Triton
        return _first_line(error)
    return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + 1


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0][:120]


def _choose_code() -> None:
    """Lets the compiler contract a·b + c, which it forbids itself on CPUs by default (a third of pointwise time), and
    takes the processor's word for its vector instructions, each of which it would test for seconds."""
    import torch._inductor.config

    torch._inductor.config.cpp.enable_floating_point_contract_flag = "fast"
    torch._inductor.config.cpp.vec_isa_ok = True


def _start() -> bool:
    """Whether this PyTorch has what it hooks into. Raises whatever the toolchain raises where it does not work."""
    import torch._functorch.config

    with ThreadPoolExecutor(1) as aside:
        works = aside.submit(_find_tools)
        import torch._dynamo.guards
        import torch._inductor.compile_fx  # noqa: F401
    try:
        works.result()
        _compile_later()
    except (ImportError, AttributeError, TypeError):
        return False
    torch._functorch.config.force_non_lazy_backward_lowering = True
    # For a line of its log PyTorch flushes the processor's caches and times each graph's checks: half a second in all.
    guards: Any = torch._dynamo.guards
    guards.profile_guard_manager = lambda *_: 0.0
    return True


def _find_tools() -> None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    _choose_code()  # settings are a thread's own
    pick_vec_isa()  # before a second thread asks: what it finds while two look is not always the same
    threading.Thread(target=_precompile_header, name=HEADER_THREAD, daemon=True).start()
    _load_a_library()


def _load_a_library() -> None:
    """Compiles a tiny kernel against PyTorch's headers, loads it and runs it; one compiled before is only loaded."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu")
    command = CppBuilder("probe", ["probe.cpp"], options).get_command_line()
    name = "quern-" + hashlib.sha256((torch.__version__ + command + PROBE).encode()).hexdigest()[:32]
    library = Path(cache_dir()) / name
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(PROBE, encoding="utf-8")
            builder = CppBuilder("probe", [str(source)], options, folder)
            builder.build()
            os.replace(builder.get_target_file_path(), library)
    vector = (ctypes.c_float * 64)()
    ctypes.CDLL(str(library)).kernel(vector)
    if vector[0] != 1.0:
        raise RuntimeError("a compiled kernel does not compute what it should")


def _precompile_header() -> None:
    """By way of a kernel of which nothing more is wanted: the header stays on disk, under a lock of PyTorch's own.

    What fails here fails again, and is said, where the first graph asks for the header.
    """
    with contextlib.suppress(Exception):
        from torch._inductor.async_compile import AsyncCompile

        _choose_code()
        AsyncCompile().cpp_pybinding(["float*"], PROBE)


def _compile_later() -> None:
    """A module of kernels no longer waits for all of them when it is loaded."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CodeCacheFuture

    def leave(self: Any, scope: dict[str, Any]) -> None:
        for name, kernel in list(scope.items()):
            if isinstance(kernel, CodeCacheFuture):
                scope[name] = _Later(scope, name, kernel)

    if hasattr(AsyncCompile, "_wait_futures"):
        AsyncCompile._wait_futures = leave


class _Later:
    """A kernel that is being compiled; the first use waits for it and puts it in its place in the module."""

    def __init__(self, scope: dict[str, Any], name: str, future: Any) -> None:
        self._scope, self._name, self._future = scope, name, future

    def _now(self) -> Any:
        kernel = self._scope[self._name] = self._future.result()
        return kernel

    def __call__(self, *arguments: Any) -> Any:
        return self._now()(*arguments)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._now(), attribute)
