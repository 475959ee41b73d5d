"""TrainState: the model, its optimizer and how far they are; what a checkpoint holds and nothing else.

The parameters themselves are not saved: they are the fp32 masters rounded to the compute dtype. Batches are a pure
function of (seed, step), so the position in the data is the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quern.machine import Machine
from quern.mesh import Mesh
from quern.model.count import Flops, weightless
from quern.optim.groups import make_groups
from quern.parallel.zero2 import Zero2
from quern.parallel.zero3 import Zero3
from quern.recipe import Resolved
from quern.train.guard import Guard


@dataclass(kw_only=True)
class Counters:
    """Progress of a run; every checkpoint holds it beside the tensors."""

    guard: Guard
    step: int = 0  # updates done, skipped or empty
    empty_steps: int = 0  # steps without a target
    tokens: int = 0  # targets of all steps, skipped ones too
    flops: Flops = Flops()  # FLOPs of all steps but empty ones
    seconds: float = 0.0  # time spent in steps
    unlogged_nats: float = 0.0
    unlogged_tokens: int = 0  # loss since the last line of the log: a resumed run logs what the uninterrupted one would
    earlier_updates: int = 0
    """Number of updates by the stage whose optimizer state this one continues. AdamW's bias corrections count them."""
    plans: list[tuple[int, int]] = field(default_factory=list)  # plans of a run that trains for a time (horizon.py)

    @property
    def updates(self) -> int:
        """The optimizer's updates so far, of earlier stages too."""
        return _updates(self.meta())

    def meta(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint."""
        counts = {one.name: getattr(self, one.name) for one in fields(Counters)}
        plans = [list(plan) for plan in self.plans]
        guard = {"skips_in_row": self.guard.skips_in_row, "skips": self.guard.skips}  # max_skips is the recipe's
        return counts | {"flops": asdict(self.flops), "plans": plans, "guard": guard}

    def count_from(self, meta: dict[str, Any]) -> None:
        """Puts the counters where `meta` left them."""
        self.guard.skips_in_row, self.guard.skips = meta["guard"]["skips_in_row"], meta["guard"]["skips"]
        self.step, self.tokens, self.seconds = meta["step"], meta["tokens"], meta["seconds"]
        self.flops = Flops(**meta.get("flops", {}))
        self.empty_steps, self.earlier_updates = meta.get("empty_steps", 0), meta.get("earlier_updates", 0)
        self.unlogged_nats, self.unlogged_tokens = meta["unlogged_nats"], meta["unlogged_tokens"]
        self.plans = [(step, steps) for step, steps in meta.get("plans", [])]


@dataclass
class TrainState(Counters):
    """The state of a run in PyTorch."""

    model: Any
    optimizer: Zero2

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by logical name; views of live memory. On one process only."""
        if self.optimizer.mesh.world.size > 1:
            raise ValueError("the state is spread over several processes: read it by `optimizer.slices`")
        return {name: part.tensor for name, part in self.optimizer.slices().items()}

    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Restores the state that `tensors` and `meta` returned, bit for bit."""
        self.optimizer.load_state_tensors(tensors)
        self.count_from(meta)

    def go_on(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> bool:
        """Takes the weights of another stage, and its optimizer's state where it fits; the steps begin at 0.

        A fresh AdamW moves every parameter by its full rate at first, however small the gradients are. Measured on the
        quickstart's model, the loss of fine-tuning then rises from 3.5 to 12.7 in one step.

        Returns:
            Whether the optimizer's state fits.

        Raises:
            ValueError: The weights are another model's; then nothing has changed.
        """
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("held")}  # another loss's
        try:
            self.optimizer.load_state_tensors(tensors)
        except ValueError:  # another optimizer: the weights alone, which must fit
            self.optimizer.load_state_tensors(tensors, weights_alone=True)
            return False
        self.earlier_updates = _updates(meta)
        return True


def _updates(meta: dict[str, Any]) -> int:
    """The optimizer's updates up to a checkpoint, of earlier stages too."""
    idle = meta["guard"]["skips"] + meta.get("empty_steps", 0)
    return meta.get("earlier_updates", 0) + meta["step"] - idle


def build_model(
    recipe: Resolved, machine: Machine, seed: int | None, weights: dict[str, torch.Tensor] | None = None
) -> Any:
    """The recipe's model on the machine, in its compute dtype.

    seed: draws the initial weights; None leaves them to be loaded. weights: by parameter name. Raises ValueError,
    before the model takes memory, if they do not fit it.
    """
    if weights is not None:
        refuse_other_weights(recipe, weights)
    model = recipe.make_model(recipe.model)
    if seed is not None:
        model.initialize(seed)
    if weights is not None:
        model.load_state_dict(weights)
    return model.to(device=machine.device, dtype=machine.dtype)


def refuse_other_weights(recipe: Resolved, weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError unless the weights fit the recipe's model."""
    refuse_other_shapes(weightless(recipe).state_dict(), weights)


def refuse_other_shapes(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raises ValueError, which names one, for tensors of other names or shapes."""
    ours, theirs = ({name: tuple(one.shape) for name, one in state.items()} for state in (expected, found))
    if wrong := sorted(name for name, _ in ours.items() ^ theirs.items())[:1]:
        differ = f"shape {theirs.get(wrong[0], 'none')} instead of {ours.get(wrong[0], 'none')}"
        raise ValueError(f"the weights do not fit the model: {wrong[0]} has {differ}")


def build_state(recipe: Resolved, machine: Machine, model: Any, mesh: Mesh | None = None) -> TrainState:
    """A fresh state around a model whose weights are in place, and which is cut for the mesh and compiled.

    recipe: resolved.
    """
    groups = make_groups(model.parameter_groups(), recipe.make_rules(recipe), model.named_parameters())
    fp32, on_cpu = recipe.train.grad_dtype == "fp32", recipe.train.optimizer_memory == "cpu"
    optimizer = (partial(Zero3, model) if mesh is not None and mesh.zero == 3 else Zero2)(
        groups, dtype_ns=machine.dtype, compile=machine.compile, mesh=mesh, fp32_gradients=fp32, on_cpu=on_cpu
    )
    return TrainState(model, optimizer, guard=Guard(recipe.train.max_skips))


def weights_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fp32 weights in a checkpoint's tensors, by parameter name."""
    return {name.removeprefix("master."): t for name, t in tensors.items() if name.startswith("master.")}


def compile_model(model: Any, machine: Machine) -> None:
    """Compiles the model's blocks in place, where the machine can."""
    if machine.compile:
        model.compile(dynamic=False)


def refuse_unequal_replicas(state: TrainState) -> None:
    """Compares the parameters, and the optimizer state that every replica holds, over the data axis.

    Every rank of the mesh calls this. Raises ValueError, on every rank, which names a rank and a tensor that differ.
    """
    mesh = state.optimizer.mesh
    if mesh.data.size == 1:
        return
    tensors = _replicated(state)
    rows = mesh.world.gather_objects(list(map(checksum, tensors.values())))
    for rank, row in enumerate(rows):
        reference = rank % mesh.tp  # the first replica of its shard
        if places := [name for name, a, b in zip(tensors, row, rows[reference], strict=True) if a != b]:
            raise ValueError(
                f"the ranks do not start from equal weights: rank {rank} differs from rank {reference} in {places[0]}, "
                f"of {len(places)} tensors. Nothing was trained: start the same command again. If it fails again, have "
                "the memory of these ranks' machines checked"
            )


def checksum(tensor: Tensor) -> str:
    """SHA-256 (hex) of the bits of a tensor, in the order of its elements."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def _replicated(state: TrainState) -> dict[str, Tensor]:
    """The tensors of which each replica has a copy, by name."""
    buckets = state.optimizer.buckets
    shared = {name for bucket in buckets if bucket.share is not None for name, _ in bucket.parameters}
    found: dict[str, Tensor] = {name: p for name, p in state.model.named_parameters() if name not in shared}
    for bucket in state.optimizer.buckets:
        if bucket.small:
            held = {"master": bucket.masters, **bucket.state}
            found |= {f"{name} of {bucket.parameters[0][0]}": tensor for name, tensor in held.items()}
    return found
