"""Ranks run this for the laws of sharding: the same steps as one process, and how far the results lie apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.adamw_every_second import rules as every_second_rules
from quern import compiler
from quern.data.batch import Batch
from quern.mesh import Mesh, Pending, ProcessGroup, alone
from quern.model.base import recompute
from quern.optim.groups import make_groups
from quern.optim.schedule import Multipliers
from quern.parallel import buckets
from quern.parallel.plan import shard_model
from quern.parallel.sharding import sharding_of, sliced
from quern.parallel.zero2 import Zero2
from quern.parallel.zero3 import Zero3
from quern.recipe import OptimRecipe, Resolved
from quern.resolve import resolve
from quern.train import checkpoint, manifest
from quern.train.guard import Guard
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import StepResult, train_step
from tests.parallel import sharded
from tests.parallel.sharded import on_one_rank
from tests.support.deviation import deviation
from tests.support.models import RECIPES, moved
from tests.support.toy_training import CPU, toy_loader, toy_recipe, toy_schedule, toy_state

STEPS = 10  # of the schedule
# With 1e-10, AdamW makes a whole step of the rounding of a gradient that cancels out, which depends on the CPU.
EPS = 1e-4
COUNTED = {2: "two", 4: "four", 10: "ten"}


def optimized(
    mesh: Mesh, masked: bool, rows: int, clip: float | None, steps: int = STEPS, broken: bool = False
) -> dict[str, float]:
    """Steps on the mesh and on one process → deviations of losses, norms, gradients, state after the first and last.

    broken: each rank divides by its own number of targets, which must show.
    """
    begin()
    if broken:
        _local_count()
    loader = toy_loader(masked)
    expected = on_one_rank(mesh, lambda: trained(toy_state(recipe()), loader.batch, rows, clip, steps))

    def own(step: int) -> Batch:
        return loader.batch(step, mesh.data.rank, mesh.data.size)

    return apart_from(expected, sharded_state(mesh), own, rows, clip, gradients=True)


def begin() -> None:
    compiler.set_eager(True)
    small_cuts()


def small_cuts() -> None:
    """The toy's embeddings are cut, its scalars are not."""
    buckets.SMALL_ELEMENTS = 100
    buckets.LEAST_ELEMENTS = 1024


def optimized_shards(mesh: Mesh, architecture: str, recomputed: int = 0, steps: int = 4) -> dict[str, float]:
    """The same with tensor parallelism or shared parameters, for each architecture, at sizes that do not divide."""
    begin()

    def whole() -> Whole:
        state = _state(sharded.whole_model(architecture), architecture, alone())
        return trained(state, lambda step: _rows(mesh, step)[0], 2, 0.5, steps)

    expected = on_one_rank(mesh, whole)
    model = shard_model(sharded.whole_model(architecture), mesh)
    recompute(model, recomputed)
    return apart_from(expected, _state(model, architecture, mesh), lambda step: _rows(mesh, step)[1], 2, 0.5)


@dataclass(frozen=True)
class Snapshot:
    """Masters and moments by name, and the parameters in the model's order."""

    tensors: dict[str, torch.Tensor]
    parameters: list[torch.Tensor]

    @staticmethod
    def of(state: TrainState) -> Snapshot:
        tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
        return Snapshot(tensors, [p.detach().clone() for p in state.model.parameters()])


@dataclass(frozen=True)
class Whole:
    """The steps of one process; the clipped gradients of the first one, and the state after it and at the end."""

    steps: list[StepResult]
    gradients: dict[str, torch.Tensor]
    first: Snapshot
    last: Snapshot


def trained(state: TrainState, batch: Callable[[int], Batch], rows: int, clip: float | None, count: int) -> Whole:
    steps = [advance(state, batch(0), 0, rows, clip)]
    gradients = {name: p.grad.clone() for name, p in state.model.named_parameters() if p.grad is not None}
    first = Snapshot.of(state)
    steps += [advance(state, batch(step), step, rows, clip) for step in range(1, count)]
    return Whole(steps, gradients, first, Snapshot.of(state))


def apart_from(
    expected: Whole,
    ours: TrainState,
    batch: Callable[[int], Batch],
    rows: int,
    clip: float | None,
    gradients: bool = False,  # those of shards: sharded.py
) -> dict[str, float]:
    worst: dict[str, float] = {"loss": 0.0, "norm": 0.0}
    for step, wanted in enumerate(expected.steps):
        found = advance(ours, batch(step), step, rows, clip)
        worst["loss"] = max(worst["loss"], apart(found.loss, wanted.loss))
        worst["norm"] = max(worst["norm"], apart(found.grad_norm, wanted.grad_norm))
        if found.tokens != wanted.tokens or found.positions != wanted.positions:
            worst["loss"] = float("inf")
        if step == 0:  # later the weights differ by roundings, and with them what the gradients should be
            if gradients:
                worst["gradients"] = gradients_apart(ours.optimizer, expected.gradients)
            worst["one update"] = state_apart(ours, expected.first)
    return worst | {f"{COUNTED[len(expected.steps)]} updates": state_apart(ours, expected.last)}


def saved_shards(mesh: Mesh, architecture: str, source: str | None, target: str) -> list[str]:
    """Resumes from `source`, or trains a step; saves to `target` → what differs in a bit from the file loaded."""
    begin()
    state = _state(shard_model(sharded.whole_model(architecture), mesh), architecture, mesh)
    differing = []
    if source is None:
        advance(state, _rows(mesh, 0)[1], 0, 2, None)
    else:
        differing = restored(state, source)
    checkpoint.save(Path(target), 3, state.optimizer.slices(), {"state": state.meta()}, keep=1, mesh=mesh)
    return differing


def restored(state: TrainState, source: str) -> list[str]:
    """Loads a checkpoint; returns what differs in a bit from it."""
    gather(state)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.zero_()
    tensors, meta = checkpoint.load(manifest.path_of(Path(source), 3))
    state.restore(tensors, meta["state"])
    differing = [n for n, part in state.optimizer.slices().items() if not torch.equal(part.tensor, part.of(tensors[n]))]
    gather(state)
    for name, parameter in state.model.named_parameters():
        part = sliced(parameter.detach(), sharding_of(parameter), 0, len(parameter), saved=True)
        if part is not None and not torch.equal(part.tensor, part.of(tensors[f"master.{name}"])):
            differing.append(name)
    return differing


def _state(model: Any, architecture: str, mesh: Mesh) -> TrainState:
    optim = OptimRecipe(lr_scale=0.01, decay_scale=0.1, eps=EPS)
    rules = RECIPES[architecture].make_rules(replace(RECIPES[architecture], optim=optim))
    groups = make_groups(model.parameter_groups(), rules, model.named_parameters())
    optimizer = Zero3(model, groups, mesh=mesh) if mesh.zero == 3 else Zero2(groups, mesh=mesh)
    return TrainState(model, optimizer, guard=Guard(1))


def gather(state: TrainState) -> None:
    """Makes parameters whole that replicas share, until the next pass."""
    for part in state.optimizer.parts if isinstance(state.optimizer, Zero3) else ():
        part.gather()
        part.wait()


def _rows(mesh: Mesh, step: int) -> tuple[Batch, Batch]:
    """The global batch of five rows, and this replica's share of it, which may be larger than another's."""
    tokens, targets, scale = (part.numpy() for part in sharded.batch(5))
    tokens, targets = (tokens + step) % sharded.VOCABULARY, (targets + 3 * step) % sharded.VOCABULARY
    tokens[:, 0] = sharded.BOS
    arrays = tokens.astype("int32"), targets.astype("int32"), scale > 0, (scale > 0) * (1 + scale)
    own = tuple(array[mesh.data.rank :: mesh.data.size] for array in arrays)
    return Batch(*arrays), Batch(*own)


def recipe() -> Resolved:
    """The toy's, at the rates that a batch this small has by the recipe's own rule."""
    return Resolved.of(resolve(replace(toy_recipe(), optim=OptimRecipe(decay_scale=0.1, eps=EPS))))


def sharded_state(mesh: Mesh) -> TrainState:
    return build_state(recipe(), CPU, moved(build_model(recipe(), CPU, 0)), mesh)


def advance(state: TrainState, batch: Any, step: int, rows: int, clip: float | None) -> StepResult:
    return train_step(state, batch, toy_schedule(STEPS)(step), CPU, micro_batch_rows=rows, clip_norm=clip)


def apart(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def gradients_apart(optimizer: Zero2, expected: dict[str, torch.Tensor]) -> float:
    """The largest deviation in the regions that this rank sums, after clipping."""
    ours, theirs = [], []
    for bucket in optimizer.buckets:
        whole = torch.zeros_like(bucket.grads)
        for (name, _), view in zip(bucket.parameters, bucket.param_views, strict=True):
            at = view.storage_offset() - bucket.params.storage_offset()
            whole[at : at + view.numel()] = expected[name].flatten()
        ours.append(bucket.region_grads)
        theirs.append(whole[bucket.begin : bucket.end])
    return deviation(ours, theirs)


def state_apart(ours: TrainState, expected: Snapshot) -> float:
    """Masters, moments, and the parameters themselves, which every rank holds whole. Second moments are means of
    squares, whose relative deviation is twice that of the root by which an update is divided: the roots are compared.
    """
    found, wanted = [], []
    for name, part in ours.optimizer.slices().items():
        pair = part.tensor, part.of(expected.tensors[name])
        one, other = (tensor.sqrt() for tensor in pair) if name.startswith("second.") else pair
        found.append(one)
        wanted.append(other)
    gather(ours)
    for parameter, whole in zip(ours.model.parameters(), expected.parameters, strict=True):
        part = sliced(parameter.detach(), sharding_of(parameter), 0, len(parameter), saved=True)
        if part is not None:
            found.append(part.tensor)
            wanted.append(part.of(whole))
    return deviation(found, wanted)


def _local_count() -> None:
    """Counts the targets of each rank alone, as most trainers do."""
    reduce = ProcessGroup.all_reduce

    def all_reduce(self: ProcessGroup, tensor: torch.Tensor, op: str = "sum") -> Pending:
        return Pending(None, self) if tensor.dtype == torch.int64 else reduce(self, tensor, op)

    ProcessGroup.all_reduce = all_reduce  # type: ignore[method-assign]


def silent(mesh: Mesh) -> str:
    """Returns the error of a step in which a parameter has no gradient."""
    state = sharded_state(mesh)
    batch = toy_loader().batch(0, mesh.data.rank, mesh.data.size)
    state.model.value_embeddings = torch.nn.ModuleDict()  # the model forgets them
    compiler.set_eager(True)
    try:
        train_step(state, batch, Multipliers(), CPU, micro_batch_rows=3)
    except ValueError as error:
        return str(error)
    return ""


# Groups that are updated on every second step ---------------------------------------------------------------

CADENCE_STEPS, SAVED = 6, 3
"""The checkpoint is written between the two steps of an update."""


def every_second(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Trains on the mesh and on one process; saves after step 3, resumes on the mesh and on one process.

    Returns the deviations, the names that a resume changes, and the bytes that this rank sent in each step.
    """
    begin()
    reference = cadence_state(alone())
    state = cadence_state(mesh)
    path, sent, worst = Path(folder) / str(mesh.world.size), [], 0.0
    for step in range(CADENCE_STEPS):
        expected = step_of(reference, alone(), step)
        before = sum(mesh.traffic().values())
        found = step_of(state, mesh, step)
        sent.append(sum(mesh.traffic().values()) - before)
        worst = max(worst, apart(found.loss, expected.loss), apart(found.grad_norm, expected.grad_norm))
        if step % 2:
            worst = max(worst, state_apart(state, Snapshot.of(reference)))
        if step + 1 == SAVED:
            checkpoint.save(path, SAVED, state.optimizer.slices(), {"state": state.meta()}, keep=1, mesh=mesh)
    resumed, alone_resumed = resumed_at(mesh, path), resumed_at(alone(), path)
    slices = state.optimizer.slices()
    differing = [n for n, part in resumed.optimizer.slices().items() if not torch.equal(part.tensor, slices[n].tensor)]
    ours, theirs = (list(one.tensors().values()) for one in (alone_resumed, reference))
    return {"worst": worst, "differing": differing, "reshaped": deviation(ours, theirs), "sent": sent}


def resumed_at(mesh: Mesh, path: Path) -> TrainState:
    tensors, meta = checkpoint.load(manifest.path_of(path, SAVED))
    assert any(name.startswith("held.") for name in tensors)
    state = cadence_state(mesh)
    state.restore(tensors, meta["state"])
    for step in range(SAVED, CADENCE_STEPS):
        step_of(state, mesh, step)
    return state


def cadence_state(mesh: Mesh) -> TrainState:
    asked = recipe()
    optim = OptimRecipe(lr_scale=0.01, decay_scale=0.1, width_scale=1.0, eps=EPS)
    asked = replace(asked, make_rules=every_second_rules, optim=optim, model=replace(asked.model, kv_heads=2))
    return build_state(asked, CPU, shard_model(moved(build_model(asked, CPU, 0)), mesh), mesh)


def step_of(state: TrainState, mesh: Mesh, step: int) -> Any:
    return advance(state, toy_loader().batch(step, mesh.data.rank, mesh.data.size), step, 3, 0.5)
