"""Paths of attention that not every machine has: Triton, cuDNN, an installed Flash Attention.

Each is a `Backend`: a function with the arguments of `attend`, and which masks it supports without a dense mask. An
import shows which of them exist; autotune.py runs them to find which work and how fast they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quern.kernels.attention.attend import (
    MaskSpec,
    attend_plain,
    attend_sdpa,
    scale_or_default,
    split_window,
)
from quern.kernels.attention.blocked import attend_in_blocks
from quern.kernels.attention.flash import flash_attention

AttendFunction = Callable[[Tensor, Tensor, Tensor, MaskSpec, float | None], Tensor]


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Args:
        windows: It skips what windows hide.
        documents: It skips what documents hide.
        growing: The window may be a tensor.
    """

    name: str
    attend: AttendFunction
    windows: bool = False
    documents: bool = False
    growing: bool = False

    def __str__(self) -> str:
        return self.name


PLAIN = Backend("plain", attend_plain, growing=True)
SDPA = Backend("sdpa", attend_sdpa, growing=True)
BLOCKED = Backend("blocked", attend_in_blocks, windows=True, documents=True, growing=True)
"""`attend` on a CPU; on other devices the substitute where no kernel skips hidden keys."""


def cudnn() -> Backend:
    """SDPA by cuDNN only, which is faster than torch's first choice on some GPUs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend_cudnn(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        if q_BTHE.size(-1) % 8 or q_BTHE.size(-1) > 128:  # cuDNN has no kernel for such heads
            return attend_sdpa(q_BTHE, k_BTKE, v_BTKE, mask, scale)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend_sdpa(q_BTHE, k_BTKE, v_BTKE, mask, scale)

    return Backend("cudnn", attend_cudnn)


def triton_flash() -> Backend:
    """The kernels of this project. Raises ImportError where Triton is not installed."""
    importlib.import_module("quern.kernels.attention.flash_launch")
    return Backend("triton", attend_flash, windows=True, documents=True, growing=True)


def attend_flash(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
    """`flash_attention` with the arguments of `attend`."""
    fixed, varying = split_window(mask.window, q_BTHE.size(1))
    window = fixed if varying is None else varying
    return flash_attention(q_BTHE, k_BTKE, v_BTKE, window, mask.documents_BT, scale_or_default(scale, q_BTHE.size(-1)))


def installed_flash(module: str) -> Backend:
    """Flash Attention 2, 3 or 4, by the name of its module. Raises ImportError where it is not installed."""
    function: Any = importlib.import_module(module).flash_attn_func

    def attend_installed(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        fixed, _ = split_window(mask.window, q_BTHE.size(1))
        reach = (fixed - 1, 0) if fixed else (-1, -1)
        scale = scale_or_default(scale, q_BTHE.size(-1))
        found = function(q_BTHE, k_BTKE, v_BTKE, softmax_scale=scale, causal=True, window_size=reach)
        return found[0] if isinstance(found, tuple) else found  # some versions also return the log-sum-exp

    return Backend(module.split(".")[0], attend_installed, windows=True)
