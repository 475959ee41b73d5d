"""Hugging Face's Llama format: the configuration and the names of the weights, in both directions.

Weights are renamed; gate and up are one parameter in quern and two in Hugging Face. Nothing is computed, so a
round trip is exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from quern.field_types import annotations_of, refuse_outside
from quern.model.llama import INIT_STD, NORM_EPS, mlp_width
from quern.recipe import ModelRecipe, ResolvedModel
from quern.records import typed

# Hugging Face's names of the weights, by quern's; those of a block follow its prefix.
OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
BLOCK = "model.layers.{}."
INSIDE = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
STACKED, GATE_UP = "mlp.gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")
PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
"""Fields of config.json, and the only value that quern computes; it is also the value of a missing field."""
RANGES = {
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "max_position_embeddings": "context",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "num_hidden_layers": "depth",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
}
"""Numbers of config.json, and the field of `ModelRecipe` whose range each has."""


class Checked(TypedDict, total=False):
    """Fields of config.json that are no numbers."""

    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    tie_word_embeddings: bool | None


def refuse_windows(shape: ResolvedModel) -> None:
    """Raises ValueError for a Llama whose attention has windows."""
    if any(window is not None for window in shape.window_sizes()):
        raise ValueError(f"the Llama of other programs has no windows ({shape.windows}): train with --model.windows L")


def weights_to(weights: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """quern's weights with Hugging Face's names. Raises KeyError if a weight is missing."""
    found = {theirs: weights[ours] for ours, theirs in OUTSIDE.items()}
    for layer in range(depth):
        before, after = f"blocks.{layer}.", BLOCK.format(layer)
        found |= {after + theirs: weights[before + ours] for ours, theirs in INSIDE.items()}
        found |= {after + theirs: part for theirs, part in zip(GATE_UP, weights[before + STACKED], strict=True)}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def weights_from(weights: Mapping[str, Tensor], depth: int, *, tied: bool) -> dict[str, Tensor]:
    """Hugging Face's weights with quern's names. Raises ValueError, naming missing and foreign ones."""
    left = {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if tied:
        left.setdefault(OUTSIDE["head.weight"], left.get(OUTSIDE["embedding.weight"], torch.empty(0)))
    missing: list[str] = []

    def take(name: str) -> Tensor:
        if name not in left:
            missing.append(name)
        return left.pop(name, torch.empty(0))

    found = {ours: take(theirs).clone() for ours, theirs in OUTSIDE.items()}
    for layer in range(depth):
        before, after = f"blocks.{layer}.", BLOCK.format(layer)
        found |= {before + ours: take(after + theirs) for ours, theirs in INSIDE.items()}
        gate, up = (take(after + name) for name in GATE_UP)
        found[before + STACKED] = torch.stack([gate, up]) if gate.shape == up.shape else gate
    if missing:
        raise ValueError(f"weights are missing: {_some(missing)}")
    if left:
        raise ValueError(f"these weights are no Llama's: {_some(sorted(left))}")
    return found


def config_to(shape: ResolvedModel) -> dict[str, Any]:
    """The fields of a Llama's config.json. Raises ValueError for a model that Hugging Face's Llama cannot represent."""
    refuse_windows(shape)
    if shape.width % shape.heads:
        raise ValueError(
            f"transformers refuses a width of {shape.width} for {shape.heads} heads: set other --model.heads"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": mlp_width(shape),
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps or NORM_EPS,
        # transformers 5 reads rope_parameters; earlier versions and most other programs read rope_theta.
        "rope_theta": shape.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": INIT_STD,
        "use_cache": True,
    }


def shape_from(config: Mapping[str, Any]) -> ResolvedModel:
    """The shape that a config.json describes. Raises ValueError for another architecture or an unsupported Llama."""
    if config.get("model_type") != "llama":
        raise ValueError(f"it holds a model of type {config.get('model_type')!r}: only llama can be imported")
    # transformers 5 has the base and the scaling in rope_parameters; earlier versions have rope_theta and rope_scaling.
    typed(config, Checked)
    rope: dict[str, Any] = {name: config.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    found = {name: config.get(name, default) for name, default in PLAIN.items()}
    for name, body in rope.items():
        found[f"{name}.rope_type"] = body.get("rope_type", body.get("type", "default"))
        found[f"{name}.partial_rotary_factor"] = body.get("partial_rotary_factor", 1.0)
    wanted = PLAIN | {name: "default" if name.endswith("type") else 1.0 for name in found.keys() - PLAIN.keys()}
    wrong = [f"{name} {value!r} instead of {wanted[name]!r}" for name, value in found.items() if value != wanted[name]]
    if wrong:
        raise ValueError(f"this kind of Llama cannot be imported: it has {', '.join(wrong)}")
    base = rope["rope_parameters"].get("rope_theta", config.get("rope_theta", 10_000.0))
    for name, field in RANGES.items():
        value = base if name == "rope_theta" else config.get(name)
        if value is not None or name not in ("num_key_value_heads", "head_dim"):
            refuse_outside(annotations_of(ModelRecipe)[field], value, f"{name} of its config.json")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return ResolvedModel(
        depth=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or width // heads,
        mlp_width=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_base=float(base),
        windows="L",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
