"""Moves a model between a run's JAX stage and its PyTorch stages, so either side can evaluate, fine-tune or serve it.

Weights are copied, optimizer state is not: training continues with fresh moments. Both sides store weights as (outputs,
inputs) in fp32, so the bridge only renames parameters, and a round trip changes no bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from safetensors.numpy import save

from quern.grug.mesh import place
from quern.grug.model import JaxBlock, Params, layout
from quern.grug.state import Grug, state_of, step_config
from quern.recipe import ResolvedModel
from quern.runs.load import open_checkpoint
from quern.runs.origin import Origin
from quern.runs.run_dir import RunDir
from quern.stages.jax.backend import JaxBackend, JaxRun, processes, refuse_unlike
from quern.stages.jax.train import STAGE, core_of, load
from quern.temporaries import whole_file
from quern.train import checkpoint, manifest
from quern.train.guard import Guard
from quern.train.state import weights_of

_IN_BLOCK = {
    "query": "attention.query.weight",
    "key": "attention.key.weight",
    "value": "attention.value.weight",
    "out": "attention.out.weight",
    "value_gate": "attention.value_gate.weight",
    "up": "mlp.up.weight",
    "down": "mlp.down.weight",
}
_OUTSIDE = {"embedding": "embedding.weight", "head": "head.weight", "smear_gate": "smear_gate.weight"}


def torch_names(params: Params) -> Params:
    """Returns the same structure with each parameter's name in the PyTorch model."""

    def block(layer: int, one: JaxBlock) -> JaxBlock:
        names = {field: f"blocks.{layer}.{name}" for field, name in _IN_BLOCK.items()}
        names["value_embedding"] = f"value_embeddings.{layer}.weight"
        return JaxBlock(**{f.name: None if getattr(one, f.name) is None else names[f.name] for f in fields(JaxBlock)})

    outside: dict[str, Any] = {f.name: _OUTSIDE.get(f.name, f.name) for f in fields(Params)}
    blocks = tuple(block(layer, one) for layer, one in enumerate(params.blocks))
    return Params(**outside | {"blocks": blocks})


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """Returns the parameters by their names in the PyTorch model, fp32, on the host."""
    pairs = zip(jax.tree.leaves(torch_names(params)), jax.tree.leaves(params), strict=True)
    return {name: np.asarray(value, dtype=np.float32) for name, value in pairs}


def from_torch(tensors: Mapping[str, np.ndarray], cfg: ResolvedModel, mesh: Mesh) -> Params:
    """Converts arrays, by their names in the PyTorch model, into parameters on the mesh. Raises ValueError naming one
    that is missing, unknown or of another shape."""
    shapes = layout(cfg, mesh)
    names = torch_names(shapes)
    expected = {name: leaf.shape for name, leaf in zip(jax.tree.leaves(names), jax.tree.leaves(shapes), strict=True)}
    refuse_unlike(tensors, expected)

    def one(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return place(np.asarray(tensors[name], dtype=np.float32), shape.sharding.spec, mesh)  # type: ignore[union-attr]

    return jax.tree.map(one, names, shapes)


def write_weights(path: Path, tensors: Mapping[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Writes one safetensors file, whole or not at all. facts: JSON for its header."""
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    with whole_file(path) as part:
        part.write_bytes(save(arrays, {"quern": json.dumps(facts)}))


def export(run_dir: RunDir, mesh: Mesh, log: Callable[[str], None]) -> Path:
    """Writes the newest JAX state as weights.safetensors, and as a base model that the other verbs find, whose path is
    returned. Raises ValueError if PyTorch has trained one in this run, or the model comes from a file of its own."""
    target = run_dir.checkpoints("pretrain")
    run, recipe, tokenizer = load(run_dir, mesh, "float32", log)
    if run.cfg.core is not Grug:
        raise ValueError(
            f"the model of run '{run_dir.run}' comes from a file ('{recipe.name}'), which PyTorch cannot read: "
            "export a run of the `gpt` recipe (`quern grug train` without a file)"
        )
    known = manifest.latest(target, log)
    if known is not None and known[1]["meta"].get("trained_by") != STAGE:
        raise ValueError(
            f"run '{run_dir.run}' has a base model that PyTorch trained ({known[0]}): move it away, or train the JAX "
            "model under another name (--run)"
        )
    meta = Origin(tokenizer.fingerprint, recipe=recipe.to_json()).meta()
    weights = to_torch(run.arrays.params)
    file = run_dir.stage(STAGE) / "weights.safetensors"
    write_weights(file, weights, {"recipe": meta["recipe"], "tokenizer": meta["tokenizer"], "step": run.step})
    tensors = {f"master.{name}": torch.from_numpy(np.array(value)) for name, value in weights.items()}
    meta |= {"state": run.meta(), "trained_by": STAGE}
    path = checkpoint.save(target, run.step, tensors, meta, recipe.train.keep)
    log(f"exported step {run.step:,} → {file} and {path}")
    return path


def bring_over(run_dir: RunDir, mesh: Mesh, stage: str | None, log: Callable[[str], None]) -> Path:
    """Writes the newest PyTorch model, by default of the last stage, as a JAX checkpoint with fresh moments; returns
    its folder. Raises FileNotFoundError or CheckpointError without a model, ValueError for another architecture or a
    run with a JAX model."""
    target = run_dir.checkpoints(STAGE)
    if manifest.steps(target):
        raise ValueError(f"run '{run_dir.run}' has a JAX model already: move {run_dir.stage(STAGE)} away first")
    start = open_checkpoint(run_dir, run_dir.require_trained(stage)[-1], log)
    recipe, core = start.recipe, core_of(start.recipe)
    with jax.set_mesh(mesh):
        weights = {name: tensor.float().numpy() for name, tensor in weights_of(start.tensors).items()}
        cfg = step_config(recipe, "float32", core)
        arrays = state_of(from_torch(weights, recipe.model, mesh), jax.random.key(recipe.seed), cfg)
    run = JaxRun(arrays, cfg, mesh, guard=Guard(0), step=start.step, tokens=start.state["tokens"])
    meta = Origin(start.tokenizer.fingerprint, recipe=recipe.to_json()).meta() | {"state": run.meta()}
    ranks = processes()
    checkpoint.save(target, run.step, JaxBackend(run, ranks).save(), meta, recipe.train.keep, ranks)
    log(f"imported step {run.step:,} of {start.stage} → {target}")
    return target
