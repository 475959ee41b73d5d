"""Flash attention's kernels through Triton's compiler for GPUs that are not here: do the tiles suit the hardware?

Compiling needs no GPU, and what comes out can be read: the registers that spill, the shared memory, whether matrix
instructions run asynchronously and copies go through the copy engine. It says nothing about results or speed.
The whole table is compiled by `make campaign`, its first rows always.
"""

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quern.kernels.attention.flash_tiles import (
    KEYS,
    QUERIES,
    WITH_DESCRIPTORS,
    WITH_POINTERS,
    Tiles,
    candidates,
    shared_bytes,
)
from tests.support.gpu_compiler import compile_for_gpu, own_cache

__all__ = ["own_cache"]  # a fixture

triton = pytest.importorskip("triton", reason="has builds for Linux only")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # of an A100 and of an H100 or H200: what one program may use
SPILLED_BYTES = 512  # a handful of registers, outside the loops; a tile that is too large spills thousands


class Variant(NamedTuple):
    kernel: str
    E: int
    tiles: Tiles
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
    from quern.kernels.attention.flash_launch import KERNELS, READ_IN_TILES

    kernel, (queries, keys, warps, stages) = KERNELS[variant.kernel], variant.tiles
    constants = {"GROUPS": variant.groups, "E": variant.E, "BOUNDED": variant.packed, "PRECISION": "ieee"}
    constants |= {QUERIES: queries, KEYS: keys, "TMA": variant.descriptors}
    if not variant.packed:
        constants |= {"first": None, "last": None}
    read = READ_IN_TILES[variant.kernel] if variant.descriptors else {}
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
        kernels = WITH_DESCRIPTORS if descriptors else WITH_POINTERS
        for kernel, E, architecture in itertools.product(kernels, head_dims, architectures):
            for tiles in candidates(kernel, E, 2, descriptors, SHARED_MEMORY[architecture])[:rows]:
                for packed, groups in ((False, 1), (True, 4)):
                    yield Variant(kernel, E, tiles, architecture, descriptors, packed, groups)


def check(variant: Variant, folder: Path) -> None:
    found = compiled(variant, folder)
    assert found.shared_bytes <= SHARED_MEMORY[variant.architecture]
    assert found.spilled_bytes <= SPILLED_BYTES, found.spilled_bytes
    if variant.descriptors:
        assert not found.serialised
        assert "wgmma.mma_async" in found.ptx and "cp.async.bulk.tensor" in found.ptx
        estimate = shared_bytes(variant.kernel, variant.tiles, variant.E, 2, True)
        assert abs(found.shared_bytes - estimate) <= 4096


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
    large = Variant("key_gradients", 128, Tiles(128, 64, 4, 2), 90, True, packed=False)
    assert compiled(large, tmp_path).spilled_bytes > SPILLED_BYTES


def test_no_window_and_no_length_is_compiled_for() -> None:
    from quern.kernels.attention.flash_launch import KERNELS

    for name in ("forward", "query_gradient", "key_gradients"):
        varying = {parameter.name for parameter in KERNELS[name].params if parameter.do_not_specialize}
        assert varying >= {"T", "window", "length_class"}


def test_only_tiles_that_fit_are_tried() -> None:
    for descriptors, E in itertools.product((True, False), (16, 32, 64, 128, 256)):
        for kernel in WITH_DESCRIPTORS:
            tried = candidates(kernel, E, 2, descriptors, SHARED_MEMORY[90])
            assert 1 <= len(tried) <= 3
            assert all(shared_bytes(kernel, tiles, E, 2, descriptors) <= SHARED_MEMORY[90] for tiles in tried)
            assert candidates(kernel, E, 2, descriptors, 0)  # the smallest, for Triton to judge
