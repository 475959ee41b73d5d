"""Replicas that share their parameters: what they hold by hand, what is refused, in bf16, and compiled.

tests/laws/test_ranks_law.py compares them with one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quern import compiler
from quern.cli import main
from quern.data.batch import Batch
from quern.machine import Machine
from quern.mesh import Mesh, connect
from quern.model.base import recompute
from quern.optim.schedule import Multipliers
from quern.parallel import zero3
from quern.parallel.buckets import Bucket
from quern.train.state import build_model, build_state, compile_model
from quern.train.step import train_step
from tests.parallel.sharded import whole_model
from tests.parallel.test_traffic import CONTEXT, ROWS, recipe, small_cuts, stepping
from tests.support.deviation import deviation
from tests.support.ranks import Ranks


def live(mesh: Mesh, architecture: str) -> list[int]:
    """The most elements of parameters, and of gradients, that have memory on this rank in a step."""
    compiler.set_eager(True)
    small_cuts()
    state, step = stepping(mesh, architecture)
    allocate, most = zero3.allocate, [0, 0]

    def counting(buffer: torch.Tensor) -> None:
        allocate(buffer)
        now = [sum(_held(bucket, kind) for bucket in state.optimizer.buckets) for kind in ("params", "grads")]
        most[:] = map(max, most, now)

    step()
    zero3.allocate = counting
    step()
    for bucket in state.optimizer.buckets:
        if bucket.share is not None:  # nothing stays
            assert bucket.params.untyped_storage().nbytes() == bucket.grads.untyped_storage().nbytes() == 0
    return most


def _held(bucket: Bucket, kind: str) -> int:
    whole = getattr(bucket, kind)
    if bucket.share is None:
        return whole.numel()
    return whole.untyped_storage().nbytes() // whole.itemsize + getattr(bucket.share, kind).numel()


def test_what_a_replica_holds_by_hand(ranks: Ranks) -> None:
    """llama, width 64, four layers, a vocabulary of 1,001, on two replicas."""
    down = 64 * 192
    block = 2 * 64 * 64 + 2 * 32 * 64 + 3 * down  # query and out, key and value, gate, up and down
    table = 2 * 501 * 64  # embedding, or head: 1,001 rows and one of padding
    norms = 9 * 64
    held = norms + (4 * block + 2 * table) // 2
    # Most parameters are whole while the loss is computed, which the last block outlasts. Most gradients, while the
    # head's are sent and the last block's first matrix has its own.
    expected = [held + block + table, held + table + down]
    assert ranks(2, "tests.parallel.test_zero3:live", zero=3, architecture="llama") == [expected] * 2
    assert block + table < (4 * block + 2 * table) // 2


def test_one_replica_has_nothing_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["pretrain", "--zero", "3", "--ranks", "2", "--tp", "2"]) == 1
    assert "--zero 3 shares parameters among replicas, and there is one" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--zero 3 shares"):  # as started by torchrun
        connect(2, torch.device("cpu"), 0, 2, zero=3)


def test_what_cannot_be_shared_is_refused() -> None:
    capped, tied = whole_model("gpt"), whole_model("gpt")
    capped.cap = torch.tanh
    tied.head.weight = tied.embedding.weight
    for model, reason in (capped, "needs a cap that the loss kernel knows"), (tied, "are one parameter"):
        with pytest.raises(ValueError, match=f"{reason}.*: use --zero 2"):
            zero3.Zero3(model, [])


def timeouts(mesh: Mesh) -> list[float]:
    groups = (group.group for group in (mesh.data, mesh.model, mesh.world))
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_every_group_has_the_time_limit_of_the_start(ranks: Ranks) -> None:
    assert ranks(4, "tests.parallel.test_zero3:timeouts", tp=2) == [[60.0] * 3] * 4


def trained(mesh: Mesh, architecture: str, dtype: str, compiled: bool = False, recomputed: int = 0) -> list[Any]:
    """Three steps → their losses, and how many graphs were compiled by then."""
    compiler.set_eager(not compiled)
    small_cuts()
    machine = Machine(torch.device("cpu"), getattr(torch, dtype), compiled, 1)
    made = recipe(architecture)
    made = replace(made, train=replace(made.train, grad_dtype="fp32"))
    model = build_model(made, machine, 0)
    compile_model(model, machine)
    recompute(model, recomputed)
    state = build_state(made, machine, model, mesh)
    generator = torch.Generator().manual_seed(0)
    losses, graphs = [], []
    for _ in range(3):
        tokens, targets = torch.randint(1, 1001, (2, ROWS, CONTEXT), generator=generator, dtype=torch.int32).numpy()
        batch = Batch(*(array[mesh.data.rank :: mesh.data.size] for array in (tokens, targets, targets > 0)))
        losses.append(train_step(state, batch, Multipliers(lr=0.1), machine, micro_batch_rows=ROWS).loss)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] if compiled else 0)
    return [losses, graphs]


def apart(found: list[Any], expected: list[Any]) -> float:
    """The deviation of the losses: owners of matrices differ between layouts, and the law compares their state."""
    return deviation(*([torch.tensor(losses) for losses, _ in one] for one in (found, expected)))


def test_in_bf16(ranks: Ranks) -> None:
    """One micro-batch, so that gradients are rounded alike."""
    arguments: dict[str, Any] = {"architecture": "gpt", "dtype": "bfloat16"}
    whole, shared = (ranks(2, "tests.parallel.test_zero3:trained", zero=zero, **arguments) for zero in (2, 3))
    assert apart(shared, whole) <= 1e-4


@pytest.mark.campaign
@pytest.mark.parametrize("recomputed", [0, 4])
def test_compiled(recomputed: int, ranks: Ranks) -> None:
    """The same compiled code; nothing is compiled after the first step."""
    arguments: dict[str, Any] = {"architecture": "gpt", "dtype": "float32", "recomputed": recomputed}
    plain = ranks(2, "tests.parallel.test_zero3:trained", zero=3, **arguments)
    found = ranks(2, "tests.parallel.test_zero3:trained", zero=3, compiled=True, **arguments)
    assert apart(found, plain) <= 1e-5
    assert all(one[1][0] == one[1][-1] > 0 for one in found)
