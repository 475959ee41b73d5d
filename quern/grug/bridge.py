"""The bridge to PyTorch: parameters ↔ arrays under the names of the PyTorch model, and safetensors files of them.

Both sides store weights as (outputs, inputs) in fp32, so the bridge only renames, and a round trip changes no bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save

from quern.grug.mesh import place
from quern.grug.model import JaxBlock, Params, layout
from quern.recipe import ResolvedModel
from quern.temporaries import whole_file

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
    """Converts arrays, by their names in the PyTorch model, into parameters that are sharded over the mesh.

    Raises ValueError naming the arrays that are missing, unknown or of another shape.
    """
    shapes = layout(cfg, mesh)
    names = torch_names(shapes)
    expected = dict(zip(jax.tree.leaves(names), jax.tree.leaves(shapes), strict=True))
    if problems := list(_problems(expected, tensors)):
        raise ValueError(f"these weights do not fit the recipe's model: {'; '.join(problems[:5])}")

    def one(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return place(np.asarray(tensors[name], dtype=np.float32), shape.sharding.spec, mesh)  # type: ignore[union-attr]

    return jax.tree.map(one, names, shapes)


def _problems(expected: Mapping[str, Any], found: Mapping[str, np.ndarray]) -> Iterator[str]:
    yield from (f"{name} is missing" for name in expected.keys() - found.keys())
    yield from (f"{name} is unknown" for name in found.keys() - expected.keys())
    for name in expected.keys() & found.keys():
        if found[name].shape != expected[name].shape:
            yield f"{name} is {found[name].shape}, not {expected[name].shape}"


def write_weights(path: Path, tensors: Mapping[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Writes one safetensors file, completely or not at all. facts: JSON for its header (recipe, tokenizer, step)."""
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    with whole_file(path) as part:
        part.write_bytes(save(arrays, {"quern": json.dumps(facts)}))
