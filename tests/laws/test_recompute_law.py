"""Law: blocks that run again in the backward pass leave the same bits.

Every gradient, the loss and the losses of single tokens, for each architecture, with dropout too.
test_tensor_law.py has what they send on shards.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quern.model import base as module
from quern.model.base import recompute
from quern.model.llama import Llama
from tests.laws.table import Law
from tests.parallel.sharded import ARCHITECTURES, SHAPE, batch, passed, whole_model

DROPPED = "llama with dropout"


def results(architecture: str, blocks: int) -> tuple[list[Tensor], int]:
    """Loss, losses and gradients of two micro-batches; and how many bytes autograd kept."""
    model = Llama(replace(SHAPE, mlp_width=84, dropout=0.3)) if architecture == DROPPED else whole_model(architecture)
    if architecture == DROPPED:
        model.initialize(1)
    recompute(model, blocks)
    torch.manual_seed(3)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        parts = [tuple(part[at] for part in batch(3)) for at in (slice(0, 1), slice(1, None))]
        loss, losses = passed(model, parts)
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [loss, losses, *grads], sum(kept.values())  # type: ignore[list-item]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, DROPPED])
def test_the_same_bits(architecture: str, law: Law) -> None:
    expected, most = results(architecture, 0)
    for blocks in (1, 1000):
        found, kept = results(architecture, blocks)
        differing = sum(not torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        law(f"run again in the backward pass = kept: {architecture}", differing, unit="bit for bit")
        assert kept < most * (0.95 if blocks == 1 else 0.5)


@pytest.mark.usefixtures("eager")
def test_the_law_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run draws other numbers for dropout."""
    checkpoint = module.checkpoint
    monkeypatch.setattr(module, "checkpoint", lambda *args, **kw: checkpoint(*args, preserve_rng_state=False, **kw))
    expected, found = results(DROPPED, 0)[0], results(DROPPED, 2)[0]
    assert not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
