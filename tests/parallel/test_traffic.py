"""Bytes that a training step sends, counted on real processes over gloo, against the formula and by hand; and when."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quern import compiler
from quern.data.batch import Batch
from quern.estimate.layout import lay_out
from quern.estimate.predict import bytes_per_step, data_bytes
from quern.mesh import Mesh
from quern.optim.schedule import Multipliers
from quern.parallel import buckets
from quern.parallel.plan import shard_model
from quern.recipe import ModelRecipe, Resolved, TrainRecipe
from quern.recipes import llama, llama_adamw
from quern.resolve import resolve
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import train_step
from tests.parallel.sharded import reset_traffic
from tests.support.models import RECIPES
from tests.support.ranks import Ranks
from tests.support.toy_training import CPU

CONTEXT, ROWS = 13, 12


def recipe(architecture: str) -> Resolved:
    """Twelve rows, so that 2, 3 and 4 replicas have equal shares, each in two unequal micro-batches."""
    kv_heads = 8 if architecture == "unet" else 4
    shape = ModelRecipe(
        width=64, head_dim=8, heads=8, kv_heads=kv_heads, context=CONTEXT, vocab_size=1001, bos=0, windows="L"
    )
    train = TrainRecipe(steps=4, batch_tokens=ROWS * CONTEXT, micro_batch_tokens=2 * CONTEXT)
    return Resolved.of(resolve(replace(RECIPES[architecture], depth=4, model=shape, train=train)))


def small_cuts() -> None:
    """Several stacks, with cut and uncut rows."""
    buckets.SMALL_ELEMENTS, buckets.LEAST_ELEMENTS = 2000, 10_000


def stepping(mesh: Mesh, architecture: str) -> tuple[TrainState, Callable[[], object]]:
    """A model with its optimizer, and a function that makes a step on random tokens."""
    made = recipe(architecture)
    model = shard_model(build_model(made, CPU, 0), mesh)
    state = build_state(made, CPU, model, mesh)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(1, 1001, (2, ROWS, CONTEXT), generator=generator, dtype=torch.int32).numpy()
    batch = Batch(*(array[mesh.data.rank :: mesh.data.size] for array in (tokens, targets, targets > 0)))
    return state, lambda: train_step(state, batch, Multipliers(), CPU, micro_batch_rows=2)


def counted(mesh: Mesh, architecture: str) -> dict[str, int]:
    compiler.set_eager(True)
    small_cuts()
    _, step = stepping(mesh, architecture)
    if mesh.zero == 3:
        step()  # after which the last block stays gathered
    reset_traffic(mesh)
    step()
    return mesh.traffic()


def leaving(mesh: Mesh, architecture: str) -> list[list[int]]:
    """For three steps, how many buckets were sent after the first, second… gradient of the last backward pass."""
    compiler.set_eager(True)
    small_cuts()
    state, step = stepping(mesh, architecture)
    parameters, left, found, calls = list(state.model.parameters()), [], [], []
    send = mesh.data.reduce_scatter
    mesh.data.reduce_scatter = lambda out, whole: calls.append(out) or send(out, whole)
    for parameter in parameters:  # these hooks come after the optimizer's
        parameter.register_post_accumulate_grad_hook(lambda _: left.append(len(calls)))
    for _ in range(3):
        calls.clear()
        step()
        found.append(left[-len(parameters) :])
    return found


def formula(architecture: str, dp: int, tp: int, zero: int = 2) -> list[dict[str, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SMALL_ELEMENTS", 2000)
        patch.setattr(buckets, "LEAST_ELEMENTS", 10_000)
        layout = lay_out(recipe(architecture), torch.float32, dp, tp, zero)
        ranks = [bytes_per_step(layout, rank) for rank in range(dp * tp)]
        most = bytes_per_step(layout)
    assert most == {kind: max(one.get(kind, 0) for one in ranks) for kind in most}
    return ranks


@pytest.mark.parametrize(("architecture", "dp", "tp"), [("gpt", 3, 1), ("gpt", 2, 2), ("llama", 1, 2), ("unet", 2, 2)])
def test_a_step_sends_what_the_formula_says(architecture: str, dp: int, tp: int, ranks: Ranks) -> None:
    kinds = {"data/reduce_scatter", "data/all_gather", "data/all_reduce"} if dp > 1 else set()
    kinds |= {f"model/{kind}" for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") if tp > 1}
    expected = formula(architecture, dp, tp)
    found = {kind for one in expected for kind in one}
    assert found - {"data/all_to_all"} == kinds | {"world/all_reduce"}
    assert dp != 3 or "data/all_to_all" in found  # matrices that three replicas cannot share evenly
    assert ranks(dp * tp, "tests.parallel.test_traffic:counted", tp=tp, architecture=architecture) == expected


@pytest.mark.parametrize(("architecture", "dp", "tp"), [("unet", 3, 1), ("llama", 2, 2)])
def test_so_does_a_step_of_replicas_that_share_parameters(architecture: str, dp: int, tp: int, ranks: Ranks) -> None:
    found = ranks(dp * tp, "tests.parallel.test_traffic:counted", tp=tp, zero=3, architecture=architecture)
    assert found == formula(architecture, dp, tp, zero=3)
    whole = formula(architecture, dp, tp)
    assert all(one["data/all_gather"] > other["data/all_gather"] for one, other in zip(found, whole, strict=True))


@pytest.mark.parametrize("architecture", ["gpt", "unet"])
def test_gradients_leave_while_others_are_made(architecture: str, ranks: Ranks) -> None:
    """In the first step buckets wait for those that the model completes last. If the ranks sent in different orders,
    this would hang."""
    for first, *later in ranks(2, "tests.parallel.test_traffic:leaving", architecture=architecture):
        half = len(first) // 2
        for counts in later:
            assert first[half] < counts[half]
            assert counts[0] == 1 and counts[half] >= 3 and counts[-1] > counts[half]


def test_elementwise_groups_are_split_where_replicas_share_the_work(monkeypatch: Any) -> None:
    """Every parameter of llama_adamw has an elementwise rule. A part ends before it would exceed an eighth of all."""
    monkeypatch.setattr(buckets, "LEAST_ELEMENTS", 10_000)
    made = replace(recipe("llama"), make_rules=llama_adamw.RECIPE.make_rules)
    alone, shared = (lay_out(made, torch.float32, dp, 1) for dp in (1, 2))
    assert len(alone.buckets) == len({bucket.group.name for bucket in alone.buckets})
    eighth = sum(p.numel() for p in shared.shard.parameters()) // 8
    names = [name for name, _ in shared.shard.named_parameters()]
    places = [[names.index(name) for name, _ in bucket.parameters] for bucket in shared.buckets]
    sizes = [sum(p.numel() for _, p in bucket.parameters) for bucket in shared.buckets]
    assert max(size for size, place in zip(sizes, places, strict=True) if len(place) > 1) <= eighth
    assert sum(len(place) > 1 for place in places) >= 4 and sorted(sum(places, [])) == list(range(len(names)))
    assert all(one == sorted(one) for one in places)


def test_the_formula_by_hand(monkeypatch: Any) -> None:
    """llama with two layers, width 16, vocabulary 400, on 3 replicas in bf16."""
    monkeypatch.setattr(buckets, "SMALL_ELEMENTS", 1000)
    shape = ModelRecipe(width=16, head_dim=8, heads=2, mlp_width=32, context=8, vocab_size=400, windows="L")
    train = TrainRecipe(steps=1, batch_tokens=3 * 8)
    made = resolve(replace(llama.RECIPE, depth=2, model=shape, train=train))
    # Query, key, value and out of two layers are one stack of 8 times 256; gate and up (2, 32, 16) of two layers are
    # one, and so are down. A third of 2,048 elements, of 2,048 and of 1,024, to a multiple of 64:
    regions = 704, 704, 384
    # 400 rows on 3 ranks: 134 places, in embedding and head.
    rows = 2 * 3 * 134 * 16
    norms = 5 * 64  # each begins at a multiple of 64
    moved = 2 * 2 * (3 * sum(regions) + rows) // 3
    small = 2 * 2 * 2 * norms // 3 + 2 * 2 * 32 // 3 + 2 * 2 * 4 // 3
    layout = lay_out(made, torch.bfloat16, 3, 1)
    assert data_bytes(layout) == {
        "data/reduce_scatter": moved,
        "data/all_gather": moved,
        "data/all_reduce": small,
        "world/all_reduce": 2 * 2 * 4 // 3,
    }
    # Gate and up cost most, and go to ranks 0 and 1; down, half as much, both to rank 2; of the rest 3, 3 and 2.
    leaving = [0 + 0 + 384, 64 + 320 + 384, 128 + 640 + 0]  # of each rank's regions, in the order of above
    back = [64 + 320 + 0, 128 + 640 + 0, 0 + 0 + 768]
    sent = [2 * (there + here) for there, here in zip(leaving, back, strict=True)]
    assert [bytes_per_step(layout, rank)["data/all_to_all"] for rank in range(3)] == sent


def test_more_replicas_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot feed 13 replicas: raise --train.batch-tokens, or use fewer --gpus"):
        lay_out(recipe("gpt"), torch.float32, 13, 1)
