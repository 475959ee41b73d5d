"""The paths of attention, and the choice of the fastest one on this machine for each kind of mask.

A path is eligible if it is installed, agrees with the plain twin forward and backward on a small odd shape, and can be
compiled where the machine compiles. The fastest eligible path at a usual shape wins; a later path must be clearly
faster than an earlier one, so that the choice is the same at every start. A path that builds a dense mask serves
windows and documents only if nothing else works, the blocked path included. `quern bench attention` times the paths.
"""

from __future__ import annotations

import importlib
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quern.compiler import TRITON_FOUND
from quern.kernels.attention.attend import (
    MaskSpec,
    attend_in_blocks,
    attend_plain,
    attend_sdpa,
    scale_or_default,
    split_window,
)
from quern.kernels.attention.flash import flash_attention
from quern.machine import Machine

AttendFunction = Callable[[Tensor, Tensor, Tensor, MaskSpec, float | None], Tensor]
KINDS = FULL, *HIDING = ("full", "window", "growing", "documents")
"""Kinds of masks: causal only; a fixed window; a window in a tensor; documents, with or without a window."""


@dataclass(frozen=True)
class Backend:
    """One way to compute attention. attend: has the arguments of `attend`; skips: the kinds of masks whose hidden keys
    it does not read. For the others it builds a dense mask, except `installed_flash`, which `fits` keeps from them."""

    name: str
    attend: AttendFunction
    skips: Sequence[str] = ()

    def __str__(self) -> str:
        return self.name


def attend_cudnn(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
    """SDPA by cuDNN only, which is faster than torch's first choice on some GPUs. torch chooses where cuDNN has no
    kernel, and without gradients, where lengths vary and it would plan for each shape (`machine.detect`)."""
    unknown = q_BTHE.size(-1) % 8 or q_BTHE.size(-1) > 128 or k_BTKE.size(1) == 1 or q_BTHE.dtype == torch.float32
    if unknown or not torch.is_grad_enabled():
        return attend_sdpa(q_BTHE, k_BTKE, v_BTKE, mask, scale)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend_sdpa(q_BTHE, k_BTKE, v_BTKE, mask, scale)


PLAIN = Backend("plain", attend_plain)
SDPA = Backend("sdpa", attend_sdpa)
CUDNN = Backend("cudnn", attend_cudnn)
FLASH = Backend("triton", flash_attention, HIDING)
BLOCKED = Backend("blocked", attend_in_blocks, HIDING)
"""`attend` on a CPU; on other devices the substitute where no kernel skips hidden keys."""


def installed_flash(module: str) -> Backend:
    """Flash Attention 2, 3 or 4, by the name of its module. Raises ImportError where it is not installed."""
    function: Any = getattr(importlib.import_module(module), "flash_attn_func", None)
    if function is None:  # the folder of another version's module
        raise ImportError(f"{module} has no flash_attn_func")

    def attend_installed(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        fixed, _ = split_window(mask.window, q_BTHE.size(1))
        reach = (fixed - 1, 0) if fixed else (-1, -1)
        scale = scale_or_default(scale, q_BTHE.size(-1))
        found = function(q_BTHE, k_BTKE, v_BTKE, softmax_scale=scale, causal=True, window_size=reach)
        return found[0] if isinstance(found, tuple) else found  # some versions also return the log-sum-exp

    return Backend(module, attend_installed, ("window",))


# The choice ------------------------------------------------------------------------------------------------

MARGIN = 1.1
"""The factor by which a later path must be faster than an earlier one."""
SIZES = (2, 4096, 8, 8, 128)
"""The timed shape: rows, tokens, heads, key/value heads, head dim."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Error relative to the plain twin in 2-norm; fp32 allows for TF32."""


@dataclass(frozen=True, eq=False)
class Picked:
    """Attention with the chosen path for each kind of mask; a `machine.Attention`."""

    paths: Mapping[str, Backend]

    def attend(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        return self.path(mask, q_BTHE.size(1)).attend(q_BTHE, k_BTKE, v_BTKE, mask, scale)

    def path(self, mask: MaskSpec, T: int) -> Backend:
        """The chosen path for a mask. T: tokens in a row."""
        return self.paths[kind_of(mask, T)]

    def __str__(self) -> str:
        return ", ".join(f"{kind} {path}" for kind, path in self.paths.items())


def kind_of(mask: MaskSpec, T: int) -> str:
    if mask.documents_BT is not None:
        return "documents"
    if isinstance(mask.window, Tensor):
        return "growing"
    return "full" if mask.window is None or mask.window >= T else "window"


def fits(backend: Backend, kind: str) -> bool:
    """Whether the path skips the keys that such a mask hides."""
    return kind == FULL or kind in backend.skips


def available(machine: Machine) -> list[Backend]:
    """The installed paths for the dtype, whether they work or not, in the order of preference."""
    if machine.device.type != "cuda":
        return [SDPA]
    paths = [*([FLASH] if TRITON_FOUND else []), *([CUDNN] if machine.dtype != torch.float32 else []), SDPA]
    for module in ("flash_attn_interface", "flash_attn.cute", "flash_attn"):
        with suppress(ImportError):  # not installed
            paths.append(installed_flash(module))
    return paths


def select_attention(machine: Machine) -> Machine:
    """Returns the machine with its attention chosen, and with a note for each path that does not work.

    On a CPU nothing is timed: the blocked path is the only one that skips hidden keys, and it is the fastest.
    """
    if machine.device.type == "cpu":
        return replace(machine, attention=BLOCKED)
    there, notes, picked = available(machine), [], {}
    for kind in KINDS:
        picked[kind], failures = pick(kind, there, machine)
        notes += [note for note in failures if note not in notes]
    return replace(machine, attention=Picked(picked), notes=(*machine.notes, *notes))


def pick(
    kind: str, there: list[Backend], machine: Machine, sizes: tuple[int, ...] = SIZES
) -> tuple[Backend, list[str]]:
    """Returns the fastest path that works, and a line for each that does not."""
    best, best_seconds, notes = None, float("inf"), []
    for backend in there:
        if not fits(backend, kind):
            continue
        problem = problem_with(backend, kind, machine)
        if problem is not None:
            notes.append(f"{backend.name} attention does not work here ({problem}): using another")
            continue
        seconds = seconds_of(backend, kind, machine, sizes)
        if seconds * MARGIN < best_seconds:
            best, best_seconds = backend, seconds
    if best is not None:
        return best, notes
    if kind != FULL:
        if problem_with(BLOCKED, kind, machine) is None:
            notes.append("no kernel here skips what a window hides: using plain products, block by block")
            return BLOCKED, notes
        notes.append("nothing here skips what a window hides: windows cost as much as full attention")
    return (SDPA if problem_with(SDPA, kind, machine) is None else PLAIN), notes


def example(kind: str, T: int, device: torch.device | None = None) -> MaskSpec:
    """A mask of the kind, for 2 rows."""
    if kind == "growing":
        return MaskSpec(torch.tensor(T // 4, dtype=torch.int32))
    if kind == "documents":
        ids_T = torch.arange(T, dtype=torch.int32, device=device) // (T // 3)
        return MaskSpec(T // 4, torch.stack([ids_T, ids_T // 2]))
    return MaskSpec(T // 4 if kind == "window" else None)


def inputs(machine: Machine, B: int, T: int, H: int, K: int, E: int) -> tuple[list[Tensor], Tensor]:
    """Random q, k, v that require gradients, and a gradient for y."""
    numbers = torch.Generator().manual_seed(0)
    sizes = [(B, T, H, E), (B, T, K, E), (B, T, K, E), (B, T, H, E)]
    *x, grad = (torch.randn(size, generator=numbers).to(machine.device, machine.dtype) for size in sizes)
    return [one.requires_grad_() for one in x], grad


def problem_with(backend: Backend, kind: str, machine: Machine) -> str | None:
    """The reason in a few words why the path does not work; None if it agrees with the plain twin."""
    T = 301
    (q, k, v), grad = inputs(machine, 2, T, 4, 2, SIZES[-1])  # the timed head dim: its compiled kernels are used again
    mask = example(kind, T, machine.device)
    # Traced whole, as a model's blocks are; the compiler's backend does not matter here.
    traced = torch.compile(backend.attend, backend="aot_eager", dynamic=False, fullgraph=True)
    attend = traced if machine.compile else backend.attend
    wanted = attend_plain(q, k, v, mask, 0.1)
    expected = [wanted, *torch.autograd.grad(wanted, (q, k, v), grad)]
    try:
        y = attend(q, k, v, mask, 0.1)
        found = [y, *torch.autograd.grad(y, (q, k, v), grad)]
        machine.synchronize()
    except Exception as error:  # of a kernel, a driver or the compiler: any class
        text = str(error).strip().splitlines() or [type(error).__name__]
        return text[0][:120]
    for a, b in zip(found, expected, strict=True):
        off = ((a.float() - b.float()).norm() / b.float().norm()).item()
        if not off <= TOLERANCE[machine.dtype]:
            return f"its results are off by {off:.1g}"
    return None


def seconds_of(backend: Backend, kind: str, machine: Machine, sizes: tuple[int, ...]) -> float:
    """The fastest of a few runs, forward and backward. sizes: rows, tokens, heads, key/value heads, head dim."""
    (q, k, v), grad = inputs(machine, *sizes)
    mask = example(kind, sizes[1], machine.device)

    def run() -> None:
        torch.autograd.grad(backend.attend(q, k, v, mask, None), (q, k, v), grad)
        machine.synchronize()

    machine.synchronize()
    return min(timeit.repeat(run, number=1, repeat=7))
