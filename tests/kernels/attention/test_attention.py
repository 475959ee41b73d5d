"""What attention may see, and its compilation. The grid of shapes is the kernel law's."""

import pytest
import torch
from torch import Tensor

from quern.kernels.attention.attend import MaskSpec
from quern.kernels.attention.blocked import attend, attend_blocked, kept_elements


def inputs(T: int, heads: int = 4, kv_heads: int = 2, E: int = 8, B: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T)

    def draw(heads: int) -> Tensor:
        return torch.randn(B, T, heads, E, generator=generator).requires_grad_()

    return draw(heads), draw(kv_heads), draw(kv_heads)


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
