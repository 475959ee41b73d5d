"""Compiles Triton kernels for GPUs, where there is none."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is thrown away, instead of staying in the home folder. Import it into the test file."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def compile_for_gpu(
    kernel: Any,
    types: dict[str, Any],
    constants: dict[str, Any],
    *,
    warps: int,
    stages: int = 3,
    architecture: int = 90,
    multiples: Collection[str] | None = None,
) -> Any:
    """Returns what Triton's compiler makes of a kernel.

    Args:
        types: Of the arguments that are not constant.
        architecture: 80 or 90.
        multiples: Integers that are multiples of 16, as all pointers and strides are; None for all.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(names):
        kind = signature[name]
        if isinstance(kind, tuple):
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(len(kind))}
        elif kind[0] == "*" or (kind[0] == "i" and (multiples is None or name in multiples)):
            aligned[i,] = [["tt.divisibility", 16]]
    values: dict[Any, Any] = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    return compile(
        source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps, "num_stages": stages}
    )
