"""Kernels compile for GPUs, where there is none: the interpreter, which the laws run in, knows no types and no threads.

Each is compiled to machine code for sm_90 with bf16 inputs, 16-byte aligned, as a model launches it; what is asserted
are instructions whose absence would make it slow. What it computes is the laws' matter.
"""

import pytest

pytest.importorskip("triton")

from quern.kernels import cross_entropy_triton, rope_triton
from tests.support.gpu_compiler import compile_for_gpu, own_cache

__all__ = ["own_cache"]  # a fixture

STRIDES = ("i32", "i32", "i32")
SIZES = {"B": "i32", "T": "i32", "H": "i32", "V": "i32"}
SCALARS = {"gain": "fp32", "eps": "fp32", "direction": "fp32"}
TABLES = {"cos": "*fp32", "sin": "*fp32", "table_stride": "i32"}


@pytest.mark.parametrize("capped", [True, False])
def test_the_loss_reads_and_writes_sixteen_bytes_at_a_time(capped: bool) -> None:
    types = {"logits": "*bf16", "targets": "*i64", "scale": "*fp32", "losses": "*fp32", "factor": "*fp32"}
    types |= {"row_stride": "i32", "V": "i32", "height": "fp32", "slope": "fp32"}
    constants = {"CAPPED": capped, "GRADIENT": True, "BLOCK": 4096}
    found = compile_for_gpu(cross_entropy_triton.loss_kernel, types, constants, warps=8).asm["ptx"]
    assert found.count("ld.global.v4") == (2 if capped else 4)  # 16 logits a thread, in one pass or two
    assert found.count("st.global.v4") == 2


@pytest.mark.parametrize("name", ["turn_kernel", "norm_gradient_kernel"])
def test_rope_reads_and_writes_sixteen_bytes_at_a_time(name: str) -> None:
    types = SIZES | SCALARS | TABLES | {one: "*bf16" for one in ("x", "y", "grad", "dx")}
    types |= {"x_strides": STRIDES, "grad_strides": STRIDES}
    constants = {"E": 128, "HALF": 64, "ROWS": 32} | ({"NORM": True} if name == "turn_kernel" else {})
    found = compile_for_gpu(getattr(rope_triton, name), types, constants, warps=4).asm["ptx"]
    assert found.count("st.global") == found.count("st.global.v4") == 4
    assert found.count("ld.global") == found.count("ld.global.v4")
    assert "bar.sync" not in found  # a head's norm stays within a warp
