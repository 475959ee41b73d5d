"""A toy recipe, corpus and state that train in milliseconds, eagerly, on one thread; shared by tests of training."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quern.data.loader import Batch, Loader
from quern.data.shards import Corpus
from quern.machine import Machine
from quern.model.count import FlopCounter, Flops
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import ModelRecipe, OptimRecipe, Resolved, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.train.loop import TrainingPlan
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import TorchBackend
from tests.support import models
from tests.support.memory_corpus import memory_corpus
from tests.support.models import CPU

CONTEXT, ROWS, VOCABULARY = 16, 8, 61  # an odd vocabulary, and fewer tokens than heads would hide


def toy_recipe(model: dict[str, Any] | None = None, **train: Any) -> Resolved:
    """Depth 2, width 32, two heads that share one key, a window of 4 in the first layer."""
    shape = {"width": 32, "head_dim": 16, "kv_heads": 1, "context": CONTEXT, "vocab_size": VOCABULARY, **(model or {})}
    optim = OptimRecipe(lr_scale=0.1, decay_scale=0.1)
    made = TrainRecipe(**{"steps": 12, "batch_tokens": ROWS * shape["context"], **train})
    return Resolved.of(resolve(replace(RECIPE, depth=2, model=ModelRecipe(**shape), optim=optim, train=made)))


def toy_corpus(masked: bool = False, documents: int = 40) -> Corpus:
    """Documents in which a token hints at the next one, so that there is something to learn."""
    rng = np.random.default_rng(0)
    texts = [[0, *(1 + rng.integers(0, 7, n).cumsum() % (VOCABULARY - 1))] for n in rng.integers(3, 40, documents)]
    if not masked:
        return memory_corpus(texts)
    masks = [(rng.random(len(text)) < 0.4) & (np.arange(len(text)) > 0) for text in texts]
    for mask in masks:
        mask[-1] = True
    return memory_corpus(texts, masks)


def toy_loader(masked: bool = False, rows: int = ROWS, seed: int = 0) -> Loader:
    return Loader(toy_corpus(masked), CONTEXT, rows, seed, "first-fit-decreasing" if masked else "best-fit")


def toy_state(recipe: Resolved | None = None, machine: Machine = CPU, moved: float = 0.05) -> TrainState:
    """A fresh state. moved: the size of the noise on every weight."""
    recipe = recipe or toy_recipe()
    return build_state(recipe, machine, models.moved(build_model(recipe, machine, recipe.seed), moved))


def toy_backend(state: TrainState) -> TorchBackend:
    return TorchBackend(state, CPU)


def toy_schedule(steps: int, **options: Any) -> Any:
    return warmup_stable_decay(TrainRecipe(**{"steps": steps, "warmup_steps": 2, **options}))  # type: ignore


class ToyFlops(FlopCounter):
    """A thousand FLOPs for each position, without a model."""

    def __init__(self) -> None:
        self.update = 0.0

    def __call__(self, batch: Batch, progress: float) -> Flops:
        return Flops(1000 * batch.tokens.size)


def toy_plan(steps: int = 12, **changes: Any) -> TrainingPlan:
    often: dict[str, Any] = {"micro_batch_rows": 3, "log_every": 1, "save_every": 4, "keep": 2}
    how = {"schedule": toy_schedule(steps), "flops": ToyFlops(), "peak_flops": 1e9, **often, **changes}
    return TrainingPlan(steps=steps, **how)


def copy_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are missing on one side or differ in a single bit."""
    bits = [{name: (t.dtype, t.contiguous().numpy().tobytes()) for name, t in some.items()} for some in (one, other)]
    return sorted(name for name in one.keys() | other.keys() if bits[0].get(name) != bits[1].get(name))


def snapshot(state: TrainState) -> dict[str, torch.Tensor]:
    """Optimizer state, masters and the model's own parameters, copied."""
    parameters = {f"parameter.{name}": p.detach() for name, p in state.model.named_parameters()}
    as_saved = copy_of(state.tensors())
    return as_saved | {name: p.float().clone() for name, p in parameters.items()}


def poisoned(batch: Batch, value: float = float("nan"), row: int = -1) -> Batch:
    """The batch with one target's weight made `value`, hence a loss that is not finite."""
    weight = np.ones(batch.mask.shape, dtype=np.float32)
    column = int(np.flatnonzero(batch.mask[row])[0])
    weight[row, column] = value
    return replace(batch, weight=weight)


class PoisonedLoader(Loader):
    """A loader whose batches of some steps have a loss that is not finite."""

    poisoned_steps: frozenset[int] = frozenset()

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        batch = super().batch(step, rank, ranks)
        return poisoned(batch) if step in self.poisoned_steps else batch


def poisoned_loader(*steps: int) -> PoisonedLoader:
    loader = PoisonedLoader(toy_corpus(), CONTEXT, ROWS, 0)
    loader.poisoned_steps = frozenset(steps)
    return loader
