"""The bridge between a run's JAX stage and its PyTorch stages: weights trained in either, served in the other.

Weights cross, optimizer state does not: what was brought over can be evaluated, fine-tuned and served, and trains on
with fresh moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from quern.grug import checkpoint as jax_checkpoint
from quern.grug.bridge import from_torch, to_torch, write_weights
from quern.grug.recipe import from_torch_json, torch_json
from quern.grug.state import state_of, step_config
from quern.grug.train import Counters
from quern.runs.run_dir import STAGES, RunDir
from quern.stages.jax.train import STAGE, checkpoint_meta, load
from quern.train import checkpoint
from quern.train.guard import Guard
from quern.train.state import weights_of


def export(run_dir: RunDir, mesh: Mesh, log: Callable[[str], None]) -> Path:
    """The newest JAX state as weights.safetensors, and as a base model that every other verb finds; returns the latter.

    Raises ValueError when the run has a PyTorch base model of its own.
    """
    target = run_dir.checkpoints("pretrain")
    loaded = load(run_dir, mesh, "float32", log)
    known = checkpoint.latest(target, log)
    if known is not None and known[1]["meta"].get("trained_by") != STAGE:
        raise ValueError(
            f"run '{run_dir.run}' has a base model that PyTorch trained ({known[0]}): move it away, or train the JAX "
            "model under another name (--run)"
        )
    weights = to_torch(loaded.state.params)
    recipe = torch_json(loaded.recipe)
    facts = {"recipe": recipe, "tokenizer": loaded.tokenizer.fingerprint, "step": loaded.counters.step}
    file = run_dir.stage(STAGE) / "weights.safetensors"
    write_weights(file, weights, facts)
    counters = loaded.counters
    state = {
        "step": counters.step,
        "tokens": counters.tokens,
        "seconds": counters.seconds,
        "unlogged_nats": counters.unlogged_nats,
        "unlogged_tokens": counters.unlogged_tokens,
        "guard": Guard(loaded.recipe.train.max_skips).state(),
    }
    meta = {"recipe": recipe, "tokenizer": loaded.tokenizer.fingerprint, "seed": loaded.recipe.seed, "state": state}
    tensors = {f"master.{name}": torch.from_numpy(np.array(value)) for name, value in weights.items()}
    path = checkpoint.save(target, counters.step, tensors, {**meta, "trained_by": STAGE}, loaded.recipe.train.keep)
    log(f"exported step {counters.step:,} → {file} and {path}")
    return path


def bring_over(run_dir: RunDir, mesh: Mesh, stage: str | None, log: Callable[[str], None]) -> Path:
    """The newest PyTorch model of a stage (default: the last there is) as a JAX state with fresh moments.

    Raises FileNotFoundError when there is none, ValueError for another architecture or when the run has a JAX model.
    """
    if jax_checkpoint.steps(run_dir.checkpoints(STAGE)):
        raise ValueError(f"run '{run_dir.run}' has a JAX model already: move {run_dir.stage(STAGE)} away first")
    for name in [stage] if stage else reversed(STAGES):
        if (found := checkpoint.latest(run_dir.checkpoints(name), log)) is not None:
            break
    else:
        raise FileNotFoundError(run_dir.has_no("PyTorch model", "pretrain"))
    tensors, meta = checkpoint.load(found[0])
    recipe = from_torch_json(meta["recipe"])
    cfg = step_config(recipe, "float32")
    step = meta["state"]["step"]
    with jax.set_mesh(mesh):
        weights = {name: tensor.float().numpy() for name, tensor in weights_of(tensors).items()}
        state = state_of(from_torch(weights, recipe.model, mesh), jax.random.key(recipe.seed), cfg)
        counters = Counters(step=step, tokens=meta["state"]["tokens"])
        with jax_checkpoint.JaxSaver(run_dir.checkpoints(STAGE), recipe.train.keep) as saver:
            saver.save(step, state, {**checkpoint_meta(recipe, run_dir.tokenizer()), "counters": asdict(counters)})
    log(f"imported step {step:,} of {found[0].parent.parent.name} → {run_dir.checkpoints(STAGE)}")
    return run_dir.checkpoints(STAGE)
