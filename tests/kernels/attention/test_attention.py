"""The tokens that attention may see and reads, its operators and their compilation. The laws have the grids of shapes.

Tests that launch flash attention's kernels run in Triton's interpreter, in a child process (`interpreter.py`).
"""

import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from quern.kernels.attention.attend import MaskSpec, attend, attend_blocked, attend_plain, kept_elements
from quern.kernels.attention.flash import document_bounds, flash_attention, forward_operator
from tests.support.deviation import deviation
from tests.support.interpreter import Interpreted

SCALE = 0.2


def random_inputs(B: int, T: int, H: int, K: int, E: int = 16) -> list[Tensor]:
    """q, k, v and a gradient of y."""
    generator = torch.Generator().manual_seed(T)
    return [torch.randn(B, T, heads, E, generator=generator) for heads in (H, K, K, H)]


def inputs(T: int, E: int = 8) -> list[Tensor]:
    return [x.requires_grad_() for x in random_inputs(2, T, 4, 2, E)[:3]]


@pytest.mark.parametrize("T", [17, 700])
@pytest.mark.parametrize("window", [None, 64])
def test_nothing_hidden_leaks_a_single_bit_forward_or_backward(T: int, window: int | None) -> None:
    q, k, v = inputs(T)
    at = T // 2
    before = attend(q, k, v, MaskSpec(window))
    with torch.no_grad():
        other_k, other_v = k.clone(), v.clone()
        other_k[:, at], other_v[:, at] = 7.0, -7.0
        after = attend(q, other_k, other_v, MaskSpec(window))
    reach = T if window is None else min(T, at + window)
    assert torch.equal(before[:, :at], after[:, :at])
    assert torch.equal(before[:, reach:], after[:, reach:])
    assert not torch.isclose(before[:, at:reach], after[:, at:reach]).all(-1).all(-1).any()
    (dk,) = torch.autograd.grad(before[:, :at].square().sum(), k, retain_graph=True)
    assert dk[:, at:].count_nonzero() == 0 and dk[:, :at].count_nonzero() > 0
    if reach < T:
        (dv,) = torch.autograd.grad(before[:, reach:].square().sum(), v)
        assert dv[:, : at + 1].count_nonzero() == 0


def packed(T: int, starts: list[list[int]]) -> Tensor:
    """Document ids (B, T) from where documents start in each row."""
    ids_BT = torch.zeros(len(starts), T, dtype=torch.int32)
    for row, begins in enumerate(starts):
        ids_BT[row, begins] = 1
    return ids_BT.cumsum(1).int()


MASKS = [MaskSpec(window, ids) for window in (64, torch.tensor(64)) for ids in (None, packed(700, [[0, 512]] * 2))]


@pytest.mark.parametrize("mask", [*MASKS, MaskSpec(None, packed(700, [[0, 512]] * 2))])
def test_keys_that_no_query_sees_are_not_read(mask: MaskSpec) -> None:
    """NaN, which 0 · NaN would carry on, in the blocks of keys before the window or the second document."""
    q, k, v = inputs(700)
    with torch.no_grad():
        expected = attend(q, k, v, mask)
        k[:, :448], v[:, :448] = torch.nan, torch.nan
        found = attend(q, k, v, mask)
    assert torch.equal(found[:, 512:], expected[:, 512:])
    assert found[:, 447].isnan().all()


@pytest.mark.parametrize("now", [1, 64, 299, 5000])
def test_a_window_in_a_tensor_is_that_window(now: int) -> None:
    q, k, v = inputs(300)
    documents_BT = packed(300, [[0, 70, 200], [0]])
    results = []
    for window in (now, torch.tensor(now, dtype=torch.int32)):
        y = attend(q, k, v, MaskSpec(window, documents_BT), 0.3)
        results.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("window", "varying", "documents_BT"),
    [
        (0, None, None),
        (5, None, None),
        (200, None, None),
        (0, torch.tensor(300), None),
        (200, None, packed(300, [[0, 70, 200], [0]])),
    ],
)
def test_the_operator_keeps_torchs_contract(window: int, varying: Tensor | None, documents_BT: Tensor | None) -> None:
    """Schema, shapes under the compiler's fake tensors, and the registration of its gradient.

    In these cases the room for probabilities is filled: what is left of it otherwise is never written nor read.
    """
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs(300, E=4)]
    arguments = documents_BT, window, varying, 0.5, kept_elements(turned[0], window)
    torch.library.opcheck(attend_blocked, (*turned, *arguments))


# Flash attention --------------------------------------------------------------------------------------------


def check_operator() -> None:
    q, k, v, _ = random_inputs(2, 33, 2, 1)
    documents = torch.tensor([[0] * 10 + [1] * 23, [4] * 33], dtype=torch.int32)
    first, last = document_bounds(documents)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    for arguments in (
        (q, k, v, None, None, 0, None, SCALE),
        (q, k, v, first, last, 8, None, SCALE),
        (q, k, v, first, last, 0, torch.tensor(8), SCALE),
    ):
        torch.library.opcheck(forward_operator, arguments)


def test_the_operator_keeps_to_its_schema_and_shapes(interpreted: Interpreted) -> None:
    interpreted(check_operator)


def compilations(windows: list[int | Tensor]) -> int:
    """How often a graph around attention was compiled; every result is checked, and a break in the graph raises."""
    q, k, v, _ = random_inputs(1, 40, 2, 2)
    documents = torch.tensor([[0] * 11 + [1] * 29], dtype=torch.int32)
    counter = CompileCounter()
    torch.compiler.reset()  # what an earlier call has taught the compiler about windows

    @torch.compile(backend=counter, fullgraph=True)
    def block(q: Tensor, k: Tensor, v: Tensor, window: int | Tensor) -> Tensor:
        return flash_attention(2 * q, k, v, MaskSpec(window, documents), SCALE) + 1

    for window in windows:
        expected = attend_plain(2 * q, k, v, MaskSpec(int(window), documents), SCALE) + 1
        assert deviation([block(q, k, v, window)], [expected]) <= 1e-5
    return counter.frame_count


def test_a_growing_window_compiles_once_as_a_tensor_and_twice_as_an_int(interpreted: Interpreted) -> None:
    assert interpreted(compilations, [torch.tensor(w) for w in (4, 5, 16, 39)]) == 1
    assert interpreted(compilations, [4, 5, 16, 39]) == 2  # a constant first, then any number


def layouts() -> dict[str, float]:
    """Attention over views of one merged projection, an input off its alignment, and gradients that are expanded."""
    B, T, H, K, E = 2, 37, 4, 2, 16
    generator = torch.Generator().manual_seed(1)
    merged = torch.randn(B, T, H + 2 * K, E, generator=generator)
    q, k, v = merged.split([H, K, K], dim=2)
    expected = attend_plain(q, k, v, MaskSpec(), SCALE)
    shifted = torch.randn(merged.numel() + 1, generator=generator)[1:].view(merged.shape).copy_(merged)
    by_column = merged.transpose(1, 3).contiguous().transpose(1, 3)  # its last dimension is not contiguous
    views = {"merged": merged, "not aligned": shifted, "last dimension strided": by_column}
    found = {}
    for name, view in views.items():
        q, k, v = view.split([H, K, K], dim=2)
        found[name] = deviation([flash_attention(q, k, v, MaskSpec(), SCALE)], [expected])
    gradients = []
    for flash in (True, False):
        leaf = merged.clone().requires_grad_()
        q, k, v = leaf.split([H, K, K], dim=2)
        y = (flash_attention if flash else attend_plain)(q, k, v, MaskSpec(), SCALE)
        y.sum().backward()
        gradients.append(leaf.grad)
    return found | {"expanded gradient": deviation(gradients[:1], gradients[1:])}


def test_strides_are_read(interpreted: Interpreted) -> None:
    found = interpreted(layouts)
    assert max(found.values()) <= 1e-5, found


def finite(spot: str, window: int, documents: Tensor | None) -> list[bool]:
    """Whether y, dq, dk, dv of 64 tokens at one end of 256 are finite where `spot` is not in the half at the other."""
    queries = spot in ("q", "grad")
    poisoned, watched = (slice(128, 256), slice(0, 64)) if queries else (slice(0, 128), slice(192, 256))
    inputs = random_inputs(1, 256, 1, 1)
    inputs[("q", "k", "v", "grad").index(spot)][:, poisoned] = float("nan")
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, about the largest of numbers that are none
        y = flash_attention(q, k, v, MaskSpec(window, documents), SCALE)
        y.backward(inputs[3])
    return [bool(x[:, watched].isfinite().all()) for x in (y, q.grad, k.grad, v.grad) if x is not None]


@pytest.mark.parametrize("spot", ["q", "k", "v", "grad"])
def test_tiles_that_are_not_seen_are_not_read(interpreted: Interpreted, spot: str) -> None:
    """A tile that is read and masked would leave its trace: 0 · NaN is NaN."""
    halves = (torch.arange(256) >= 128).int()[None]
    assert interpreted(finite, spot, 64, None) == [True] * 4
    assert interpreted(finite, spot, 0, halves) == [True] * 4
    assert not all(interpreted(finite, spot, 0, None))
