"""Which path is picked: one that is there, right and fastest, by running it.

Paths that only a GPU runs are proven elsewhere; here the choice is made among paths of the CPU, some of them broken.
"""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from quern.kernels.attention import autotune
from quern.kernels.attention.attend import MaskSpec, attend, attend_plain
from quern.machine import Machine
from tests.support.deviation import deviation, random, with_gradients
from tests.support.interpreter import Interpreted

CPU = Machine(torch.device("cpu"), torch.float32, compile=False, threads=1)
SMALL = (2, 100, 4, 2, 16)


def broken(mistake: str) -> autotune.Backend:
    def path(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        if mistake == "raises":
            raise RuntimeError("no kernel image is available\nfor this device")
        if mistake == "no backward":
            return attend(q, k.detach() + 0 * k, v, mask, scale)
        if mistake == "nan":
            return attend(q, k, v, mask, scale) * float("nan")
        return attend(q, k, v, replace(mask, window=None), scale)

    return autotune.Backend(mistake, path, autotune.HIDING)


def slow(name: str, seconds: float) -> autotune.Backend:
    def path(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        time.sleep(seconds)
        return attend(q, k, v, mask, scale)

    return autotune.Backend(name, path, autotune.HIDING)


@pytest.mark.parametrize("kind", autotune.KINDS)
def test_what_works_is_found_to_work(kind: str) -> None:
    for backend in (autotune.BLOCKED, autotune.SDPA):
        assert autotune.problem_with(backend, kind, replace(CPU, compile=kind == "growing")) is None


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("raises", "no kernel image is available"),
        ("no backward", "results are off by"),
        ("nan", "results are off by nan"),
        ("window ignored", "results are off by"),
    ],
)
def test_what_is_broken_is_found_and_left_out(mistake: str, says: str) -> None:
    problem = autotune.problem_with(broken(mistake), "window", CPU)
    assert problem is not None and says in problem and "\n" not in problem
    backend, notes = autotune.pick("window", [broken(mistake), slow("slow", 0.0)], CPU, SMALL)
    assert backend.name == "slow"
    assert len(notes) == 1 and notes[0].startswith(f"{mistake} attention does not work here (")


def test_a_path_that_breaks_the_graph_is_left_out_where_the_machine_compiles() -> None:
    def untraceable(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float | None) -> Tensor:
        torch._dynamo.graph_break()
        return attend(q, k, v, mask, scale)

    assert autotune.problem_with(autotune.Backend("x", untraceable), "full", CPU) is None
    assert autotune.problem_with(autotune.Backend("x", untraceable), "full", replace(CPU, compile=True)) is not None


def test_the_fastest_is_picked_but_only_if_clearly() -> None:
    usual, faster, little_faster = slow("usual", 0.1), slow("faster", 0.0), slow("a little faster", 0.095)
    assert autotune.pick("full", [usual, faster], CPU, SMALL)[0] is faster
    assert autotune.pick("full", [usual, little_faster], CPU, SMALL)[0] is usual


def test_a_dense_mask_is_only_the_last_resort() -> None:
    assert autotune.pick("window", [autotune.SDPA, slow("skips", 0.05)], CPU, SMALL)[0].name == "skips"
    for kind in ("window", "growing", "documents"):
        backend, notes = autotune.pick(kind, [autotune.SDPA], CPU, SMALL)
        assert backend is autotune.BLOCKED and "block by block" in notes[0]
    assert autotune.pick("full", [autotune.SDPA], CPU, SMALL) == (autotune.SDPA, [])


def test_a_cpu_has_one_path_and_the_others_come_by_kind() -> None:
    machine = autotune.select_attention(CPU)
    assert machine.attention is autotune.BLOCKED
    assert machine.describe()["attention"] == "blocked"
    calls: list[str] = []

    def named(name: str) -> autotune.Backend:
        return autotune.Backend(name, lambda q, k, v, mask, scale: calls.append(name) or attend(q, k, v, mask, scale))

    picked = autotune.Picked({kind: named(kind) for kind in autotune.KINDS})
    q = torch.randn(2, 300, 2, 8)
    for kind in autotune.KINDS:
        mask = autotune.example(kind, 300)
        assert (picked.attend(q, q, q, mask, 0.2) - attend_plain(q, q, q, mask, 0.2)).abs().max() <= 1e-5
    assert calls == list(autotune.KINDS)


def test_what_is_not_installed_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        autotune.installed_flash("flash_attn_interface_that_nobody_has")


@pytest.mark.parametrize(
    ("T", "E", "dtype", "recorded"),
    [
        (9, 100, torch.float16, True),
        (9, 256, torch.float16, True),
        (1, 64, torch.float16, True),
        (9, 64, torch.float32, True),
        (9, 64, torch.float16, False),
    ],
)
def test_heads_that_cudnn_has_no_kernel_for_take_another(T: int, E: int, dtype: torch.dtype, recorded: bool) -> None:
    """On a CPU it has none for any, and says so. Without gradients, where lengths vary, each would cost it a plan."""
    q, k, v = (torch.randn(1, T, heads, E, dtype=dtype) for heads in (4, 2, 2))
    with torch.set_grad_enabled(recorded):
        found = autotune.CUDNN.attend(q, k, v, MaskSpec(), None)
    assert (found - attend_plain(q, k, v, MaskSpec())).abs().max() <= 10 * torch.finfo(dtype).eps


def test_a_gpu_that_computes_in_fp32_does_not_try_cudnn() -> None:
    """torch would print seven warnings at each start, and quern a note."""
    gpu = replace(CPU, device=torch.device("cuda"))
    tried = [[path.name for path in autotune.available(replace(gpu, dtype=one))] for one in autotune.TOLERANCE]
    assert ["cudnn" in names for names in tried] == [False, True]


def triton_deviation(kind: str) -> float:
    """Runs where Triton interprets."""
    mask = autotune.example(kind, 70)
    q, k, v, grad = (random(2, 70, heads, 16, seed=seed) for seed, heads in enumerate((4, 2, 2, 4)))
    paths = (autotune.FLASH.attend, attend_plain)
    ours, expected = (with_gradients(partial(path, mask=mask, scale=0.3), (q, k, v), grad) for path in paths)
    return deviation(ours, expected)


@pytest.mark.parametrize("kind", ["growing", "documents"])  # the others are the law's
def test_our_triton_kernels_see_what_the_mask_says(interpreted: Interpreted, kind: str) -> None:
    assert interpreted(triton_deviation, kind) <= 1e-5
