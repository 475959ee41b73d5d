"""Checks of the gauntlet and its experiments, run in JAX's process (jax_process.py)."""

from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from quern.grug import gauntlet, model
from quern.grug.mesh import BATCH, place
from quern.recipe import ModelRecipe

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "grug"


def checks(name: str) -> dict[str, Any]:
    """Returns whether each check of an experiment passed."""
    found = gauntlet.check(gauntlet.load(EXPERIMENTS / f"{name}.py"))
    return {check: value["passed"] for check, value in found.items()}


def broken(how: str) -> list[str]:
    """Returns the checks that fail on a broken experiment."""
    module: Any = gauntlet.load(EXPERIMENTS / "core.py")
    good, reference = module.loss_fn, module.reference_attention
    if how == "reference":
        module.reference_attention = lambda q, k, v, mask: 1.01 * reference(q, k, v, mask)
    elif how == "gradient":
        module.loss_fn = lambda params, *rest: good(stopped(params), *rest)
    elif how == "sharding":  # a sum that forgets what the other devices hold
        shards = lambda batch: jax.typeof(batch["tokens"]).sharding.mesh.shape["data"]  # noqa: E731
        module.loss_fn = lambda params, batch, *rest: good(params, batch, *rest) / shards(batch)
    return [check for check, value in gauntlet.check(module).items() if not value["passed"]]


def stopped(params: model.Params) -> model.Params:
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    return model.Params(**values | {"head": jax.lax.stop_gradient(params.head)})


def sinks_at_minus_infinity() -> dict[str, float]:
    """Relative deviation of the copy from the core on the same weights, with its sinks off and with sinks at 0."""
    module: ModuleType = gauntlet.load(EXPERIMENTS / "attention_sink.py")
    cfg, mesh = module.build_cfg("check"), gauntlet.single_mesh()
    core = ModelRecipe(
        depth=cfg.depth, width=cfg.width, heads=cfg.heads, kv_heads=cfg.kv_heads, head_dim=cfg.head_dim,
        vocab_size=cfg.vocab_size, context=cfg.context,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, cfg.context)).astype(np.int32)
    with jax.set_mesh(mesh):
        params = jax.tree.map(gauntlet.moved, module.init_fn(cfg, jax.random.key(0)).params)
        on_device = place(tokens, P(BATCH, None), mesh)
        outside = {f.name: getattr(params, f.name) for f in fields(model.Params)}
        blocks = tuple(
            model.JaxBlock(**{f.name: getattr(b, f.name) for f in fields(model.JaxBlock)}) for b in params.blocks
        )
        twin = model.Params(**outside | {"blocks": blocks})
        expected = model.logits(twin, model.forward(twin, on_device, core), core)
        found = {}
        for name, value in (("off", -jnp.inf), ("on", 0.0)):
            changed = [type(b)(**{**vars(b), "sinks": jnp.full_like(b.sinks, value)}) for b in params.blocks]
            copy = type(params)(**{**vars(params), "blocks": tuple(changed)})
            logits = module.fwd_fn(copy, on_device, cfg, module.attention)
            found[name] = gauntlet.relative(np.asarray(logits), np.asarray(expected))
    return found
