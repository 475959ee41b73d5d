"""Kernels compile for GPUs, where there is none: the interpreter, which the laws run in, knows no types and no threads.

Each is compiled to machine code for sm_90 with bf16 inputs, 16-byte aligned, as a model launches it; what is asserted
are instructions whose absence would make it slow. What it computes is the laws' matter.
"""

from typing import Any

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from quern.kernels import cross_entropy_triton, rope_triton

STRIDES = ("i32", "i32", "i32")
SIZES = {"B": "i32", "T": "i32", "H": "i32", "V": "i32"}
SCALARS = {"gain": "fp32", "eps": "fp32", "direction": "fp32"}
TABLES = {"cos": "*fp32", "sin": "*fp32", "table_stride": "i32"}


def ptx(kernel: Any, types: dict[str, Any], constants: dict[str, Any], warps: int, stages: int = 3) -> str:
    """The assembly of a kernel, after the assembler has taken it. types: of arguments that are not constant; all
    pointers and integers count as multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(names):
        kind = signature[name]
        if isinstance(kind, tuple):
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(len(kind))}
        elif kind[0] in "*i":
            aligned[i,] = [["tt.divisibility", 16]]
    values: dict[Any, Any] = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("capped", [True, False])
def test_the_loss_reads_and_writes_sixteen_bytes_at_a_time(capped: bool) -> None:
    types = {"logits": "*bf16", "targets": "*i64", "scale": "*fp32", "losses": "*fp32", "factor": "*fp32"}
    types |= {"row_stride": "i32", "V": "i32", "height": "fp32", "slope": "fp32"}
    found = ptx(cross_entropy_triton.loss_kernel, types, {"CAPPED": capped, "GRADIENT": True, "BLOCK": 4096}, 8)
    assert found.count("ld.global.v4") == (2 if capped else 4)  # 16 logits a thread, in one pass or two
    assert found.count("st.global.v4") == 2


@pytest.mark.parametrize("name", ["turn_kernel", "norm_gradient_kernel"])
def test_rope_reads_and_writes_sixteen_bytes_at_a_time(name: str) -> None:
    types = SIZES | SCALARS | TABLES | {one: "*bf16" for one in ("x", "y", "grad", "dx")}
    types |= {"x_strides": STRIDES, "grad_strides": STRIDES}
    constants = {"E": 128, "HALF": 64, "ROWS": 32} | ({"NORM": True} if name == "turn_kernel" else {})
    found = ptx(getattr(rope_triton, name), types, constants, 4)
    assert found.count("st.global") == found.count("st.global.v4") == 4
    assert found.count("ld.global") == found.count("ld.global.v4")
    assert "bar.sync" not in found  # a head's norm stays within a warp
