"""Compares the JAX twin with the PyTorch model, and a mesh with one device. Runs in JAX's process (jax_process.py).

Every function returns relative deviations: the norm of the difference over the norm of the expected value.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from quern import compiler
from quern.data.batch import Batch
from quern.data.loader import Loader
from quern.grug.attention import AttentionMask
from quern.grug.mesh import BATCH, make_mesh, place
from quern.grug.model import forward, logits
from quern.grug.optim import group_of, rules
from quern.grug.state import (
    Grug,
    JaxTrainState,
    StepConfig,
    device_batch,
    loss_and_grads,
    loss_fn,
    make_optimizer,
    state_of,
    step_config,
    train_step,
)
from quern.model.context import CausalContext
from quern.optim import groups
from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.recipe import ModelRecipe, OptimRecipe, Recipe, Resolved, TrainRecipe
from quern.recipes import load_recipe
from quern.resolve import resolve
from quern.stages.jax.train import core_of, from_torch, to_torch
from quern.text.tinyworld import corpus as tinyworld_corpus
from quern.text.tokenizer import Tokenizer
from quern.train.state import TrainState as TorchState
from quern.train.state import build_model, build_state
from quern.train.step import to_device
from quern.train.step import train_step as torch_step
from tests.support.memory_corpus import memory_corpus
from tests.support.toy_training import CPU, ROWS, toy_loader, toy_recipe, toy_schedule, toy_state

Arrays = dict[str, np.ndarray]
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MESHES = {  # replica_dcn, replica, data, model
    "one": (1, 1, 1, 1),
    "data": (1, 1, 8, 1),
    "model": (1, 1, 1, 2),
    "replica": (1, 2, 2, 2),
    "all": (2, 2, 1, 2),
}
compiler.set_eager(True)


@partial(jax.jit, static_argnames="cfg")
def both(state: JaxTrainState, batch: Any, told: Multipliers, cfg: StepConfig) -> Any:
    """((loss, gradients), (state, metrics)) of one step, in one compilation."""
    return loss_and_grads(state.params, batch, cfg), train_step(state, batch, told, cfg)


def deviation(found: Arrays, expected: Arrays) -> float:
    """The largest relative deviation of any array; both sides must have the same names."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(relative(found[name], value) for name, value in expected.items())


def relative(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / scale) if scale else float(np.linalg.norm(found))


def mesh_of(name: str) -> Mesh:
    sizes = MESHES[name]
    count = int(np.prod(sizes))
    axes = dict(zip(("replica_dcn", "replica", "data", "model"), sizes, strict=True))
    return make_mesh(**axes, devices=jax.devices()[:count])


def recipe_of(depth: int = 2, train: dict[str, Any] | None = None, **model: Any) -> Resolved:
    """Toy sizes with heads that a mesh can shard: by default four heads that share two keys."""
    toy = toy_recipe({"kv_heads": 2, "heads": 4, "head_dim": 8, "vocab_size": 62, **model}, **(train or {}))
    return resolve(replace(toy, depth=depth))


@cache
def recipe_in(file: str) -> Recipe:
    return load_recipe(str(EXPERIMENTS / file))[0]


def recipes_of(files: Sequence[str], **changes: Any) -> tuple[Resolved, Resolved]:
    """PyTorch's recipe and JAX's at toy sizes; by default the `gpt` recipe for both."""
    toy = recipe_of(bos=0, **changes)
    if not files:
        return toy, toy
    given = (recipe_in(file) for file in files)
    torch_recipe, twin = (
        resolve(replace(one, depth=toy.depth, text=toy.text, train=toy.train, model=replace(toy.model, depth=None)))
        for one in given
    )
    return torch_recipe, twin


def weights_of(state: TorchState) -> Arrays:
    return {name: p.detach().numpy().copy() for name, p in state.model.named_parameters()}


def batch_of(kind: str, step: int = 0) -> Batch:
    """kind: "full", or "weighted": a third of the targets, with signed weights; "half": of the rows from the third."""
    batch = toy_loader().batch(step)
    if kind == "full":
        return batch
    rng, begin = np.random.default_rng(step), 0 if kind == "weighted" else 2
    mask, weight = batch.mask.copy(), np.ones(batch.mask.shape, np.float32)
    mask[begin:] = rng.random(mask[begin:].shape) < 0.33
    weight[begin:] = rng.normal(size=mask[begin:].shape)
    return replace(batch, mask=mask, weight=weight)


def state_on(weights: Arrays, cfg: StepConfig, mesh: Mesh) -> JaxTrainState:
    return state_of(from_torch(weights, cfg.model, mesh), cfg)


# Against PyTorch --------------------------------------------------------------------------------------------


def forward_and_backward(model: dict[str, Any]) -> dict[str, float]:
    """Logits, loss and the worst gradient, on one device; some rows have all targets, the others weighted ones.

    Gradients are compared for each row. A scale is a single number, and its gradient over a whole batch can be a
    thousandth of its terms; fp32 then has three digits fewer, on both sides.
    """
    batch = batch_of("half")
    return compared(recipe_of(**model), batch, batch.split(1))


def compared(recipe: Resolved, batch: Batch, parts: Iterable[Batch], ids: np.ndarray | None = None) -> dict[str, float]:
    """Logits of a batch; losses and gradients of its parts. ids: documents of the only part's rows."""
    torch_state, mesh = toy_state(recipe), mesh_of("one")
    model, context = torch_state.model, CausalContext(None if ids is None else torch.from_numpy(ids))
    weights, tokens = weights_of(torch_state), torch.from_numpy(batch.tokens.astype(np.int64))
    with torch.no_grad():
        expected = model.logits(model(tokens, context)).numpy()
    losses, gradients = [], []
    with jax.set_mesh(mesh):
        within = AttentionMask(segment_ids=None if ids is None else place(ids, P(BATCH, None), mesh))
        core = type("Within", (Grug,), {"forward": partial(forward, mask=within)})
        cfg = step_config(recipe, "float32", core)
        params = from_torch(weights, cfg.model, mesh)
        run = jax.jit(lambda tokens: logits(params, core.forward(params, tokens, cfg.model), cfg.model))
        found = run(place(batch.tokens, P(BATCH, None), mesh))
        step = jax.jit(loss_and_grads, static_argnames="cfg")
        for part in parts:
            model.zero_grad()
            inputs, targets, scale = to_device(part, int(part.mask.sum()), CPU)
            loss, _ = model.loss(model(inputs, context), targets, scale, context)
            loss.backward()
            theirs = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
            jax_loss, ours = step(params, device_batch(part, len(part.tokens), mesh), cfg)
            losses.append((float(jax_loss), float(loss.detach())))
            gradients.append((to_torch(ours), theirs))
    stacked = [{name: np.stack([one[side][name] for one in gradients]) for name in weights} for side in (0, 1)]
    return {
        "logits": relative(found, expected),
        "loss": relative(*zip(*losses, strict=True)),
        "every gradient": deviation(stacked[0], stacked[1]),
    }


def segments() -> dict[str, float]:
    """The same where attention does not cross from one document of a row into the next; all rows at once."""
    batch = batch_of("full")
    ids = np.sort(np.random.default_rng(0).integers(0, 3, batch.tokens.shape), axis=1).astype(np.int32)
    return compared(recipe_of(), batch, [batch], ids)


def updates(steps: int = 3, files: Sequence[str] = ()) -> dict[str, float]:
    """Weights after each of a few updates by both rules, from the same weights and gradients.

    files: one of experiments/ for PyTorch and one for JAX, whose rules and rates these are. The gradients are random,
    so their matrices are well conditioned: the polar factor of a nearly singular matrix amplifies rounding, on both
    sides.
    """
    (recipe, twin), rng = recipes_of(files), np.random.default_rng(0)
    torch_state, schedule = toy_state(recipe), toy_schedule(12)
    cfg, mesh = step_config(twin, "float32", core_of(twin)), mesh_of("one")
    optimizer = make_optimizer(cfg)
    update = jax.jit(lambda grads, opt, params, told: optimizer.update(grads, opt, params, multipliers=told))
    worst = {"AdamW": 0.0, "Muon": 0.0}
    with jax.set_mesh(mesh):
        params = from_torch(weights_of(torch_state), cfg.model, mesh)
        kinds = dict(zip(to_torch(params), jax.tree.leaves(group_of(params)), strict=True))
        opt_state = optimizer.init(params)
        for step in range(steps):
            before = weights_of(torch_state)
            grads = {name: rng.normal(size=w.shape).astype(np.float32) for name, w in before.items()}
            for name, p in torch_state.model.named_parameters():
                p.grad = torch.from_numpy(grads[name].copy())
            told = schedule(step)._replace(groups={"matrices": 0.5, "head": 2.0})
            torch_state.optimizer.step(step, told)
            ours, on_mesh = (from_torch(x, cfg.model, mesh) for x in (grads, before))
            changes, opt_state = update(ours, opt_state, on_mesh, told)
            changes = to_torch(changes)
            for name, after in weights_of(torch_state).items():
                kind = "Muon" if kinds[name] == "matrices" else "AdamW"
                worst[kind] = max(worst[kind], relative(before[name] + changes[name], after))
    return worst


def direction() -> float:
    """Muon's change in one update, against quern.optim's on the same matrices (tall, wide, square)."""
    from quern.optim.muon import Muon

    rng = np.random.default_rng(1)
    worst, mesh = 0.0, mesh_of("one")
    rule: Any = rules(recipe_of().optim, jnp.dtype("float32"), 2)["matrices"]
    torch_rule, lr, _ = groups.table(recipe_of())["matrices"]
    assert isinstance(torch_rule, Muon)
    with jax.set_mesh(mesh):
        for shape in ((24, 8), (8, 24), (16, 16)):
            grad = rng.normal(size=shape).astype(np.float32)
            master = torch.zeros(1, *shape)  # so that the weights afterwards are the change
            scalars: Any = torch_rule.scalars(1, lr, 0.9, 1.0)
            fresh = torch_rule.init_state(master)
            torch_rule.update_(master, torch.from_numpy(grad)[None], fresh, scalars, dtype=torch.float32, out=None)
            zeros, ours = (place(x, P(None, None), mesh) for x in (np.zeros(shape, np.float32), grad))
            change, _ = jax.jit(rule.update)([ours], rule.init([zeros]), [zeros], multipliers=Multipliers(1.0, 0.9))
            worst = max(worst, relative(change[0], master[0].numpy()))
    return worst


def whole_step(micro_rows: int, clip_norm: float | None, files: Sequence[str] = ()) -> dict[str, float]:
    """Loss, gradient norm and weights of a whole step from the same weights. files: see `updates`."""
    recipe, twin = recipes_of(files, train={"clip_norm": clip_norm})
    torch_state, mesh, schedule = toy_state(recipe), mesh_of("one"), toy_schedule(12)
    cfg = step_config(twin, "float32", core_of(twin))
    batch, told = batch_of("weighted"), schedule(0)
    with jax.set_mesh(mesh):
        state = state_on(weights_of(torch_state), cfg, mesh)
        expected = torch_step(torch_state, batch, told, CPU, micro_batch_rows=micro_rows, clip_norm=clip_norm)
        state, found = train_step(state, device_batch(batch, micro_rows, mesh), told, cfg)
        return {
            "loss": relative(found["loss"], expected.loss),
            "gradient norm": relative(found["grad_norm"], expected.grad_norm),
            "weights": deviation(to_torch(state.params), weights_of(torch_state)),
        }


def curves(steps: int, shown: int) -> list[float]:
    """Returns |loss of JAX - loss of PyTorch| in nats for the first `shown` of `steps` steps, and the loss's decrease.

    Both train on the built-in world from the same weights. The rates are a third of the recipe's. At the full rates
    batches of this size amplify rounding: PyTorch in micro-batches of half the rows deviates from its own curve by 0.02
    nats within 300 steps, here by less than 0.0001.
    """
    context, rows = 64, 8
    texts = list(itertools.islice(tinyworld_corpus.documents(0, 1.0), 400))
    tokenizer = Tokenizer.train(texts, 512)
    corpus = memory_corpus([[tokenizer.bos, *tokenizer.encode(text)] for text in texts])
    shape = ModelRecipe(width=64, head_dim=32, context=context, vocab_size=tokenizer.vocab_size)
    train = TrainRecipe(steps=steps, batch_tokens=rows * context)
    slower = OptimRecipe(lr_scale=0.01, smear_lr=0.002)
    recipe = resolve(replace(toy_recipe(), model=shape, train=train, optim=slower))
    loader, schedule = Loader(corpus, context, rows, 0), warmup_stable_decay(recipe.train)
    torch_state = build_state(recipe, CPU, build_model(recipe, CPU, 0))
    mesh, cfg, found, losses = mesh_of("one"), step_config(recipe, "float32"), [], []
    with jax.set_mesh(mesh):
        state = state_on(weights_of(torch_state), cfg, mesh)
        for step in range(shown):
            batch = loader.batch(step)
            expected = torch_step(torch_state, batch, schedule(step), CPU, micro_batch_rows=rows)
            state, metrics = train_step(state, device_batch(batch, rows, mesh), schedule(step), cfg)
            found.append(abs(float(metrics["loss"]) - expected.loss))
            losses.append(expected.loss)
    return [*found, losses[0] - float(np.mean(losses[-10:]))]


# Against one device -----------------------------------------------------------------------------------------


def on_mesh(name: str, micro_rows: int = ROWS) -> dict[str, float]:
    """Loss, gradients and the state after a step on a mesh, against one device with the whole batch."""
    recipe = recipe_of(1)
    cfg, weights = step_config(recipe, "float32"), weights_of(toy_state(recipe))
    batch = batch_of("weighted", step=1)  # with that of step 0 the gradient of backout_scale cancels to a hundredth
    results = []
    for which, rows in (("one", ROWS), (name, micro_rows)):
        mesh = mesh_of(which)
        with jax.set_mesh(mesh):
            (loss, grads), (state, metrics) = both(
                state_on(weights, cfg, mesh), device_batch(batch, rows, mesh), toy_schedule(12)(0), cfg
            )
            leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state.opt_state))}
            results.append((float(loss), to_torch(grads), to_torch(state.params), leaves, float(metrics["grad_norm"])))
    one, many = results
    return {
        "loss": relative(many[0], one[0]),
        "every gradient": deviation(many[1], one[1]),
        "weights after one update": deviation(many[2], one[2]),
        "optimizer state": deviation(many[3], one[3]),
        "gradient norm": relative(many[4], one[4]),
    }


def blockwise() -> dict[str, float]:
    """Loss and gradients a block of positions at a time, against whole rows, on a mesh."""
    # Not seed 0, where the gradient of the smear's scale cancels to a hundredth.
    recipe, mesh = replace(recipe_of(), seed=2), mesh_of("replica")
    cfg = step_config(recipe, "float32")
    weights, batch = weights_of(toy_state(recipe)), batch_of("weighted")
    with jax.set_mesh(mesh):
        params = from_torch(weights, cfg.model, mesh)
        one = jax.tree.map(lambda x: x[0], device_batch(batch, ROWS, mesh))

        def of(block_tokens: int | None) -> tuple[float, Arrays]:
            both = jax.value_and_grad(lambda p: loss_fn(p, one, cfg.model, block_tokens=block_tokens))
            loss, grads = jax.jit(both)(params)
            return float(loss), to_torch(grads)

        (whole, whole_grads), (blocks, block_grads) = of(None), of(4)
    return {"loss": relative(blocks, whole), "every gradient": deviation(block_grads, whole_grads)}
