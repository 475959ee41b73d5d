"""Kernels compile for GPUs, where there is none: the interpreter, which the laws run in, knows no types and no threads.

Compiling needs no GPU, and what comes out can be read: instructions whose absence would make a kernel slow, registers
that spill, the shared memory of flash attention's tiles, whether its matrix instructions run asynchronously and its
copies go through the copy engine. It says nothing about results or speed. The whole table of tiles is compiled by
`make campaign`, its first rows always.
"""

import itertools
import re
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="has builds for Linux only")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from quern.kernels import cross_entropy_triton, rope_triton
from quern.kernels.attention import flash_launch as launch


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code goes to the test's folder, not to the home folder."""
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
    """Compiles a kernel with Triton.

    Args:
        types: The types of the arguments that are not constant.
        architecture: 80 or 90.
        multiples: Integers that are multiples of 16, as all pointers and strides are; None for all.
    """
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
    options = {"num_warps": warps, "num_stages": stages}
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


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


# Flash attention's tiles --------------------------------------------------------------------------------------

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # of an A100 and of an H100 or H200: what one program may use
SPILLED_BYTES = 512  # a handful of registers, outside the loops; a tile that is too large spills thousands


class Variant(NamedTuple):
    kernel: str
    E: int
    tiles: launch.Tiles
    architecture: int
    descriptors: bool
    packed: bool
    groups: int = 1


class Compiled(NamedTuple):
    ptx: str
    spilled_bytes: int
    shared_bytes: int
    serialised: bool


def compiled(variant: Variant, folder: Path) -> Compiled:
    kernel, (queries, keys, warps, stages) = launch.KERNELS[variant.kernel], variant.tiles
    constants = {"GROUPS": variant.groups, "E": variant.E, "BOUNDED": variant.packed, "PRECISION": "ieee"}
    constants |= {launch.QUERIES: queries, launch.KEYS: keys, "TMA": variant.descriptors}
    if not variant.packed:
        constants |= {"first": None, "last": None}
    read = launch.READ_IN_TILES[variant.kernel] if variant.descriptors else {}
    types: dict[str, Any] = {}
    for name in kernel.arg_names:
        rows = constants.get(read.get(name, ""))
        if name in ("lse", "lse_log2", "sums"):
            types[name] = f"tensordesc<fp32[{rows}]>" if rows else "*fp32"
        elif name in ("q", "k", "v", "y", "grad", "dq", "dk", "dv"):
            types[name] = f"tensordesc<bf16[1,{rows},{variant.E}]>" if rows else "*bf16"
        elif name in ("first", "last"):
            types[name] = "*i32"
        elif name.endswith("strides"):
            types[name] = ("i32", "i32", "i32")
        else:
            types[name] = "fp32" if name.startswith("scale") else "i32"
    how = {"warps": warps, "stages": stages, "architecture": variant.architecture, "multiples": {"padded"}}
    result = compile_for_gpu(kernel, types, constants, **how)
    ptx = folder / "kernel.ptx"
    ptx.write_text(result.asm["ptx"], encoding="utf-8")
    gpu = f"sm_{variant.architecture}" + ("a" if variant.architecture == 90 else "")
    assembler = triton.knobs.nvidia.ptxas.path  # pyright: ignore[reportAttributeAccessIssue]
    command = [assembler, "-v", f"--gpu-name={gpu}", str(ptx), "-o", str(folder / "cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True)
    said = report.stdout + report.stderr
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled is not None, said
    return Compiled(result.asm["ptx"], int(spilled[1]), result.metadata.shared, "instructions are serialized" in said)


def variants(head_dims: tuple[int, ...], rows: int) -> Iterator[Variant]:
    """The first `rows` of each list of tiles, for each architecture that uses it."""
    for descriptors, architectures in ((True, (90,)), (False, (80, 90))):
        kernels = launch.WITH_DESCRIPTORS if descriptors else launch.WITH_POINTERS
        for kernel, E, architecture in itertools.product(kernels, head_dims, architectures):
            for tiles in launch.candidates(kernel, E, 2, descriptors)[:rows]:
                for packed, groups in ((False, 1), (True, 4)):
                    yield Variant(kernel, E, tiles, architecture, descriptors, packed, groups)


def check(variant: Variant, folder: Path) -> None:
    found = compiled(variant, folder)
    assert found.shared_bytes <= SHARED_MEMORY[variant.architecture]
    assert found.spilled_bytes <= SPILLED_BYTES, found.spilled_bytes
    if variant.descriptors:
        assert not found.serialised
        assert "wgmma.mma_async" in found.ptx and "cp.async.bulk.tensor" in found.ptx


def name_of(variant: Variant) -> str:
    kernel, E, tiles, architecture, descriptors, packed, _ = variant
    how = "descriptors" if descriptors else "pointers"
    return f"{kernel}-{E}-{'x'.join(map(str, tiles))}-sm_{architecture}-{how}{'-packed' * packed}"


FIRST = [v for v in variants((128,), 1) if v.packed and (v.descriptors or v.architecture == 80)]


@pytest.mark.parametrize("variant", FIRST, ids=name_of)
def test_the_first_tiles_suit_the_hardware(variant: Variant, tmp_path: Path) -> None:
    check(variant, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("variant", list(variants((16, 32, 64, 128, 256), 3)), ids=name_of)
def test_all_tiles_suit_the_hardware(variant: Variant, tmp_path: Path) -> None:
    check(variant, tmp_path)


def test_tiles_that_are_too_large_are_found(tmp_path: Path) -> None:
    large = Variant("key_gradients", 128, launch.Tiles(128, 64, 4, 2), 90, True, packed=False)
    assert compiled(large, tmp_path).spilled_bytes > SPILLED_BYTES


def test_no_window_and_no_length_is_compiled_for() -> None:
    for name in ("forward", "query_gradient", "key_gradients"):
        varying = {parameter.name for parameter in launch.KERNELS[name].params if parameter.do_not_specialize}
        assert varying >= {"T", "window", "length_class"}
