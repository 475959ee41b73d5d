"""An idea's file at toy size: its recipe, a state with every weight moved from where it starts, its batches."""

from dataclasses import replace
from pathlib import Path

import torch

from quern.data.batch import Batches
from quern.mesh import Mesh
from quern.recipe import OptimRecipe, Recipe, TrainRecipe
from quern.recipe_file import read_recipe_file
from quern.resolve import resolve
from quern.stages.pretrain import make_batches
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import train_step
from tests.support.deviation import deviation
from tests.support.toy_training import CPU, toy_corpus, toy_recipe

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
STEPS = 6


def idea_files() -> list[str]:
    """Names of the files of experiments/ that end in a recipe."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.py") if "\nRECIPE = " in path.read_text(encoding="utf-8"))


def toy(name: str) -> Recipe:
    """The idea's recipe at the size of `toy_recipe`."""
    recipe, _ = read_recipe_file(EXPERIMENTS / f"{name}.py")
    small = toy_recipe()
    model = replace(recipe.model, **{f: getattr(small.model, f) for f in ("width", "head_dim", "kv_heads", "context")})
    return resolve(
        replace(
            recipe,
            depth=2,
            model=replace(model, vocab_size=small.model.vocab_size),
            optim=OptimRecipe(lr_scale=0.1, decay_scale=0.1, eps=1e-4),  # rounding errors make no whole AdamW steps
            train=TrainRecipe(steps=STEPS, batch_tokens=small.train.batch_tokens),
        )
    )


def state_of(recipe: Recipe, mesh: Mesh | None = None) -> TrainState:
    """Projections that start at zero would hide gradients, so every weight gets noise."""
    model = build_model(recipe, CPU, recipe.seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return build_state(recipe, CPU, model, mesh)


def batches_of(recipe: Recipe) -> Batches:
    return make_batches(recipe, toy_corpus())


def train(state: TrainState, recipe: Recipe, first: int, last: int) -> list[float]:
    """Runs steps first … last - 1 → losses."""
    batches, schedule, data = batches_of(recipe), recipe.make_schedule(recipe.train), state.optimizer.mesh.data
    losses = []
    for step in range(first, last):
        batch = batches.batch(step, data.rank, data.size)
        losses.append(train_step(state, batch, schedule(step), CPU, micro_batch_rows=3).loss)
    return losses


def apart_on_ranks(mesh: Mesh, name: str) -> float:
    """On each rank: how far its share of the trained state is from that of one process."""
    with torch.compiler.set_stance("force_eager"):
        recipe = toy(name)
        ours, alone = state_of(recipe, mesh), state_of(recipe)
        for state in (ours, alone):
            train(state, recipe, 0, STEPS)
        expected, slices = alone.tensors(), ours.slices()
        parts = [part.tensor for part in slices.values()]
        return deviation(parts, [part.of(expected[name]) for name, part in slices.items()])
