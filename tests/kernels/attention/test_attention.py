"""What attention may see, and its compilation. The grid of shapes is the kernel law's."""

import pytest
import torch
from torch import Tensor

from quern import compiler
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


def test_inputs_need_not_be_contiguous() -> None:
    q, k, v = inputs(33)
    a, b, c = (torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v))
    assert not a.is_contiguous()
    assert torch.equal(attend(a, b, c, MaskSpec(9)), attend(q, k, v, MaskSpec(9)))


def packed(T: int, starts: list[list[int]]) -> Tensor:
    """Document ids (B, T) from where documents start in each row."""
    ids_BT = torch.zeros(len(starts), T, dtype=torch.int32)
    for row, begins in enumerate(starts):
        ids_BT[row, begins] = 1
    return ids_BT.cumsum(1).int()


@pytest.mark.parametrize("window", [None, 64])
def test_documents_are_skipped_and_nothing_of_theirs_leaks(window: int | None) -> None:
    """NaN, which 0 · NaN would carry on, stands in every key and value of the first row's first document."""
    q, k, v = inputs(700)
    documents_BT = packed(700, [[0, 512], [0, 512]])
    with torch.no_grad():
        expected = attend(q, k, v, MaskSpec(window, documents_BT))
        k[:, :448], v[:, :448] = torch.nan, torch.nan  # whole blocks of keys before the second document
        found = attend(q, k, v, MaskSpec(window, documents_BT))
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


def test_a_window_that_grows_does_not_compile_again() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]):  # type: ignore[no-untyped-def]
        compilations.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False)
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
        return 2 * attend(q, k, v, mask)

    with compiler.eager(False):
        q, k, v = inputs(40)
        for now in (3, 8, 21, 40):
            y = layer(q, k, v, MaskSpec(torch.tensor(now)))
            assert torch.equal(y, 2 * attend(q, k, v, MaskSpec(now)))
        assert len(compilations) == 1
        layer(q, k, v, MaskSpec(3))
        layer(q, k, v, MaskSpec(8))
        assert len(compilations) == 3  # which is what an int costs


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
