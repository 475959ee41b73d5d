"""TrainState: the model, its optimizer and how far they are; what a checkpoint holds and nothing else.

The parameters themselves are not saved: they are the fp32 masters rounded to the compute dtype. Batches are a pure
function of (seed, step), so the position in the data is the step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import torch

from quern.machine import Machine
from quern.mesh import Mesh
from quern.model.count import Flops, weightless
from quern.optim.groups import make_groups
from quern.parallel.sharding import Slice
from quern.parallel.zero2 import Zero2
from quern.parallel.zero3 import Zero3
from quern.recipe import Resolved
from quern.train.guard import Guard


@dataclass(kw_only=True)
class Counters:
    """How far a run is; every checkpoint holds it beside the tensors."""

    guard: Guard
    step: int = 0
    """Updates done, skipped or empty."""
    empty_steps: int = 0
    """Steps without a target."""
    tokens: int = 0
    """Targets trained on."""
    flops: Flops = Flops()
    """FLOPs of all positions."""
    seconds: float = 0.0
    """Time spent in steps."""
    unlogged_nats: float = 0.0
    unlogged_tokens: int = 0
    """Loss since the last line of the log: a resumed run logs what the uninterrupted one would."""
    earlier_updates: int = 0
    """Made by the stage whose optimizer state this one goes on with. AdamW's bias corrections count them."""
    plans: list[tuple[int, int]] = field(default_factory=list)
    """Plans of a run that trains for a time (horizon.py)."""

    @property
    def updates(self) -> int:
        """The optimizer's updates so far, of earlier stages too."""
        return _updates(self.meta())

    def meta(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint."""
        counts = {one.name: getattr(self, one.name) for one in fields(Counters)}
        plans = [list(plan) for plan in self.plans]
        return counts | {"flops": asdict(self.flops), "plans": plans, "guard": self.guard.state()}

    def count_from(self, meta: dict[str, Any]) -> None:
        """Puts the counters where `meta` left them."""
        self.guard.load_state(meta["guard"])
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
        """By logical name; views of live memory. On one process only."""
        return self.optimizer.state_tensors()

    def slices(self) -> dict[str, Slice]:
        """The part of `tensors` that this rank holds."""
        return self.optimizer.slices()

    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Bit for bit what `tensors` and `meta` gave."""
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
        try:
            self.optimizer.load_state_tensors(tensors)
        except ValueError:  # another optimizer: the weights alone, which must fit
            weights = {name: tensor for name, tensor in tensors.items() if name.startswith("master.")}
            self.optimizer.load_state_tensors(self.tensors() | weights)
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

    Args:
        seed: Seed of the initial weights; None leaves them to be loaded.
        weights: The weights by parameter name.

    Raises:
        ValueError: The weights are not those of such a model, which then takes no memory.
    """
    if weights is not None:
        states = weightless(recipe, machine.dtype).state_dict(), weights
        expected, found = ({name: tuple(one.shape) for name, one in state.items()} for state in states)
        if wrong := sorted(name for name, _ in expected.items() ^ found.items())[:1]:
            differ = f"shape {found.get(wrong[0], 'none')} instead of {expected.get(wrong[0], 'none')}"
            raise ValueError(f"the weights do not fit the model: {wrong[0]} has {differ}")
    model = recipe.make_model(recipe.model)
    if seed is not None:
        model.initialize(seed)
    if weights is not None:
        model.load_state_dict(weights)
    return model.to(device=machine.device, dtype=machine.dtype)


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
