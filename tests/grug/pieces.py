"""Checks of the JAX twin's parts in JAX's process (jax_process.py): masks, shardings, compilation, checkpoints."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

from quern.grug.attention import (
    AttentionMask,
    attention,
    blocked_attention,
    choose,
    cudnn_attention,
    reference_attention,
    splash_attention,
)
from quern.grug.evaluate import choose_dtype, flops_per_token, is_faster, matmul_flops, probe, validate
from quern.grug.mesh import BATCH, place
from quern.grug.model import Params, forward, layout, logits
from quern.grug.state import JaxTrainState, device_batch, init_state, step_config, train_step
from quern.optim.schedule import Multipliers
from quern.stages.jax.backend import arrays_of
from quern.stages.jax.bridge import from_torch, to_torch, write_weights
from quern.train import checkpoint, manifest
from tests.grug.parity import batch_of, deviation, mesh_of, recipe_of, relative, state_on, weights_of
from tests.grug.two_processes import save
from tests.support.toy_training import CPU, ROWS, toy_corpus, toy_loader, toy_schedule, toy_state

# Masks ------------------------------------------------------------------------------------------------------


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: AttentionMask) -> np.ndarray:
    """Attention for one query at a time, in float64."""
    B, T, H, E = q.shape
    groups = H // k.shape[2]
    y = np.zeros(q.shape)
    ids = None if mask.segment_ids is None else np.asarray(mask.segment_ids)
    for b in range(B):
        for t in range(T):
            seen = [
                s
                for s in range(T)
                if s <= t and (mask.window is None or t - s < mask.window) and (ids is None or ids[b, s] == ids[b, t])
            ]
            for h in range(H):
                scores = k[b, seen, h // groups].astype(np.float64) @ q[b, t, h] / np.sqrt(E)
                weights = np.exp(scores - scores.max())
                y[b, t, h] = (weights / weights.sum()) @ v[b, seen, h // groups]
    return y


def draw(B: int, T: int, H: int, K: int, E: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(T)
    q, k, v = (rng.normal(size=(B, T, heads, E)).astype(np.float32) for heads in (H, K, K))
    return q, k, v


def masks_of(T: int, segments: jax.Array) -> dict[str, AttentionMask]:
    return {
        "causal": AttentionMask(),
        "window of 1": AttentionMask(window=1),
        "window": AttentionMask(window=5),
        "window over the whole row": AttentionMask(window=T),
        "segments": AttentionMask(segment_ids=segments),
        "window in segments": AttentionMask(window=4, segment_ids=segments),
    }


@partial(jax.jit, static_argnames="function")
def pulled(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, function: Any) -> Any:
    """The output, and its vjp at q."""
    y, pull = jax.vjp(lambda q, k, v: function(q, k, v, mask), q, k, v)
    return y, pull(q)


def each_mask() -> dict[str, float]:
    """Outputs of the reference and of each path against the oracle, and their gradients against the reference's."""
    mesh = mesh_of("replica")
    B, T, H, K, E = 4, 21, 4, 2, 8
    host = draw(B, T, H, K, E)
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (B, T)), axis=1).astype(np.int32)
    worst: dict[str, float] = {}
    with jax.set_mesh(mesh):
        q, k, v = (place(x, P(BATCH, None, "model", None), mesh) for x in host)
        for name, mask in masks_of(T, place(ids, P(BATCH, None), mesh)).items():
            expected = oracle(*host, mask)
            paths: dict[str, Callable[..., Any]] = {"reference": reference_attention, "blocked": blocked_attention}
            if name in ("causal", "window"):
                paths["library"] = partial(cudnn_attention, implementation="xla")
            grads = {}
            for path, function in paths.items():
                y, gradients = pulled(q, k, v, mask, function)
                grads[path] = [np.asarray(g) for g in gradients]
                gap = max(relative(a, b) for a, b in zip(grads[path], grads["reference"], strict=True))
                worst[path] = max(worst.get(path, 0.0), relative(y, expected), gap)
            worst["picked"] = max(worst.get("picked", 0.0), relative(jax.jit(attention)(q, k, v, mask), expected))
    return worst


def many_blocks() -> dict[str, float]:
    """The blocked path over several blocks of queries, some with an odd number of rows: against the oracle, and its
    gradients against the reference's."""
    mesh, worst = mesh_of("one"), {"output": 0.0, "gradients": 0.0}
    host = draw(2, 300, 2, 1, 8)
    ids = (np.arange(300)[None] // np.array([[70], [190]])).astype(np.int32)
    with jax.set_mesh(mesh):
        q, k, v = (place(x, P(BATCH, None, "model", None), mesh) for x in host)
        segments = place(ids, P(BATCH, None), mesh)
        for mask in (AttentionMask(), AttentionMask(window=150, segment_ids=segments)):
            y, found = pulled(q, k, v, mask, blocked_attention)
            _, expected = pulled(q, k, v, mask, reference_attention)
            worst["output"] = max(worst["output"], relative(y, oracle(*host, mask)))
            gaps = (relative(a, b) for a, b in zip(found, expected, strict=True))
            worst["gradients"] = max(worst["gradients"], *gaps)
    return worst


def chosen(rows: list[tuple[str, str, int, int, bool]]) -> list[str]:
    """The path for each (platform, dtype, tokens, head dim, segments)."""
    return [
        choose(
            platform,
            jax.ShapeDtypeStruct((1, T, 2, E), jnp.dtype(dtype)),
            AttentionMask(segment_ids=jnp.zeros((1, T), int) if segments else None),
        ).__name__
        for platform, dtype, T, E, segments in rows
    ]


def splash() -> float:
    """The TPU kernel, interpreted, against the reference, within segments; the gauntlet has the rest."""
    mesh = mesh_of("one")
    host = draw(1, 256, 2, 1, 128)
    ids = (np.arange(256) // 100).astype(np.int32)[None]
    with jax.set_mesh(mesh):
        q, k, v = (place(x, P(BATCH, None, "model", None), mesh) for x in host)
        segments = place(ids, P(BATCH, None), mesh)
        mask = AttentionMask(segment_ids=segments)
        return relative(splash_attention(q, k, v, mask, interpret=True), reference_attention(q, k, v, mask))


def dense_mask() -> str:
    x = jnp.zeros((1, 4, 1, 2))
    try:
        attention(x, x, x, jnp.ones((4, 4), bool))  # type: ignore[arg-type]
    except TypeError as error:
        return str(error)
    return "accepted"


# Sharding and compilation -----------------------------------------------------------------------------------


def shardings() -> dict[str, str]:
    """The types of activations, parameters, gradients and optimizer state on a mesh of 8, as JAX prints them."""
    mesh, recipe = mesh_of("replica"), recipe_of(1)
    cfg = step_config(recipe, "float32")
    weights = weights_of(toy_state(recipe))
    with jax.set_mesh(mesh):
        state = state_on(weights, cfg, mesh)
        tokens = place(batch_of("full").tokens, P(BATCH, None), mesh)

        def types(params: Params) -> Any:
            x = forward(params, tokens, cfg.model)
            seen["hidden"], seen["logits"] = str(jax.typeof(x)), str(jax.typeof(logits(params, x, cfg.model)))
            return jnp.sum(x)

        seen: dict[str, str] = {}
        grads = jax.eval_shape(jax.grad(types), state.params)
        same = [
            str(jax.typeof(p).sharding.spec) == str(g.sharding.spec) == str(shape.sharding.spec)
            for p, g, shape in zip(
                *(jax.tree.leaves(x) for x in (state.params, grads, layout(cfg.model, mesh))), strict=True
            )
        ]
        momentum = jax.tree.leaves(state.opt_state.inner_states["matrices"])
        matrix = state.params.blocks[0].query
        return seen | {
            "parameters, gradients and their layout agree": str(all(same)),
            "query": str(jax.typeof(matrix)),
            "momentum": str(jax.typeof(next(m for m in momentum if m.shape == matrix.shape))),
        }


def programs() -> int:
    """How many programs `train_step` has been compiled to."""
    step: Any = train_step
    return step._cache_size()


def compiles_once() -> dict[str, Any]:
    """Two steps with other rates: one program, a lower loss on the same batch, a fresh key."""
    mesh, recipe = mesh_of("one"), recipe_of(1)
    cfg, schedule = step_config(recipe, "float32"), toy_schedule(12)
    with jax.set_mesh(mesh):
        state = init_state(0, cfg)
        batch = device_batch(batch_of("full"), ROWS, mesh)
        keys, losses, before = [np.asarray(state.rng).tolist()], [], programs()
        for step in range(4):
            state, metrics = train_step(state, batch, schedule(step), cfg)
            losses.append(float(metrics["loss"]))
            keys.append(np.asarray(state.rng).tolist())
        shapes = {name: list(value.shape) for name, value in to_torch(state.params).items()}
        expected = {name: list(p.shape) for name, p in toy_state(recipe).model.named_parameters()}
        return {
            "programs": programs() - before,
            "losses": losses,
            "keys": len({json.dumps(key) for key in keys}),
            "shapes": shapes == expected,
        }


def same_start_everywhere() -> bool:
    """Initial parameters do not depend on the mesh."""
    cfg = step_config(recipe_of(1), "float32")
    found = []
    for name in ("one", "replica"):
        with jax.set_mesh(mesh_of(name)):
            found.append(to_torch(init_state(3, cfg).params))
    return all(np.array_equal(found[0][name], found[1][name]) for name in found[0])


def not_finite() -> dict[str, bool]:
    """A step whose loss is not finite leaves weights and moments alone."""
    mesh, recipe = mesh_of("one"), recipe_of(1)
    cfg = step_config(recipe, "float32")
    batch = batch_of("full")
    weight = np.ones(batch.mask.shape, np.float32)
    weight[0, 0] = np.nan
    with jax.set_mesh(mesh):
        state = state_on(weights_of(toy_state(recipe)), cfg, mesh)
        before = host(state)
        state, metrics = train_step(state, device_batch(replace(batch, weight=weight), ROWS, mesh), Multipliers(), cfg)
        after = host(state)
    rng = len(jax.tree.leaves(state.params)) + len(jax.tree.leaves(state.opt_state))
    return {
        "nan is reported": bool(np.isnan(float(metrics["loss"]))),
        "nothing changed": all(np.array_equal(a, b) for a, b in zip(before[:rng], after[:rng], strict=True)),
    }


def bits_per_byte() -> float:
    """Against the PyTorch side's measure on the same weights."""
    from quern.data.packing import windows
    from quern.eval.bits_per_byte import bits_per_byte as torch_bits_per_byte

    recipe, corpus = recipe_of(1), toy_corpus()
    torch_state, mesh = toy_state(recipe), mesh_of("data")
    cfg = step_config(recipe, "float32")
    table = np.arange(cfg.model.vocab_size or 0, dtype=np.int32) % 4  # some tokens encode no byte
    expected = torch_bits_per_byte(torch_state.model, windows(corpus, 16, rows=8), table, CPU)
    with jax.set_mesh(mesh):
        params = from_torch(weights_of(torch_state), cfg.model, mesh)
        found = validate(params, corpus, table, 8, mesh, cfg)
    return max(relative(found["val_bpb"], expected.bpb), relative(found["val_loss"], expected.nats_per_token))


def flops() -> list[float]:
    from quern.model.count import FlopCounter

    recipe = recipe_of(2)
    with jax.set_mesh(mesh_of("replica")):
        return [flops_per_token(step_config(recipe, "float32")), FlopCounter(recipe).per_token()]


assert choose_dtype and is_faster  # called by name


def rates() -> dict[str, list[float]]:
    return probe(jax.devices()[0])


def peak() -> float:
    """The MFU's denominator, measured while a mesh of several devices is set, as in training."""
    with jax.set_mesh(mesh_of("replica")):
        return matmul_flops("float32", jax.devices()[3], 64, 1)


# Checkpoints and the bridge ---------------------------------------------------------------------------------


def host(state: JaxTrainState) -> list[np.ndarray]:
    return [np.array(leaf, copy=True) for leaf in jax.tree.leaves(state)]


def checkpoints() -> dict[str, Any]:
    """Checkpoints are saved during steps that donate the state, restored on several meshes, damaged and pruned."""
    recipe = recipe_of(1)
    cfg, schedule = step_config(recipe, "float32"), toy_schedule(12)
    folder = Path(tempfile.mkdtemp()) / "checkpoints"
    said: list[str] = []
    found: dict[str, Any] = {}
    mesh = mesh_of("replica")
    with jax.set_mesh(mesh):
        state = state_on(weights_of(toy_state(recipe)), cfg, mesh)
        kept = {}
        for step in range(4):
            batch = device_batch(toy_loader().batch(step), ROWS, mesh)
            state, _ = train_step(state, batch, schedule(step), cfg)
            kept[step] = host(state)
            save(folder, step, state, cfg, mesh, {"counters": {"step": step}})
    found["kept"] = manifest.steps(folder)
    for name in ("replica", "one", "model", "data"):
        other = mesh_of(name)
        with jax.set_mesh(other):
            like = jax.eval_shape(lambda: init_state(0, cfg))
            newest = manifest.latest(folder, said.append)
            assert newest is not None
            restored = arrays_of(checkpoint.load(newest[0])[0], like, other)
            found[f"bit for bit on {name}"] = all(
                a.tobytes() == b.tobytes() for a, b in zip(host(restored), kept[3], strict=True)
            )
            whole = NamedSharding(other, P())
            found[f"cut for {name}"] = all(
                got.sharding.is_equivalent_to(NamedSharding(other, (want.sharding or whole).spec), got.ndim)
                for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True)
            )
    found["meta"] = newest[1]["meta"]
    found["damage"] = damage(folder, said)
    shutil.rmtree(folder.parent)
    return found


def damage(folder: Path, said: list[str]) -> dict[str, Any]:
    """Flips a bit of each file of the newest checkpoint, removes each file, adds one; every damage must be noticed."""
    newest = folder / "step-00000003"
    missed = []
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        content = file.read_bytes()
        if content:
            at = len(content) // 2
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            found = manifest.latest(folder, said.append)
            if found is None or found[0].name != "step-00000002":
                missed.append(str(file.relative_to(newest)))
        file.unlink()
        found = manifest.latest(folder, said.append)
        if found is None or found[0].name != "step-00000002":
            missed.append(f"without {file.relative_to(newest)}")
        file.write_bytes(content)
    (newest / "foreign.safetensors").write_text("x", encoding="utf-8")
    found = manifest.latest(folder, said.append)
    missed += [] if found is not None and found[0].name == "step-00000002" else ["foreign"]
    (newest / "foreign.safetensors").unlink()
    good = manifest.latest(folder, said.append)
    return {"missed": missed, "named": "step 3" in said[-1], "whole again": good is not None and good[0] == newest}


def bridge() -> dict[str, Any]:
    """PyTorch → JAX on a mesh → file → PyTorch, bit for bit; and the errors for weights that do not fit."""
    recipe, mesh = recipe_of(2), mesh_of("replica")
    weights = weights_of(toy_state(recipe))
    file = Path(tempfile.mkdtemp()) / "weights.safetensors"
    with jax.set_mesh(mesh):
        write_weights(file, to_torch(from_torch(weights, recipe.model, mesh)), {"step": 3})
        with safe_open(file, framework="numpy") as opened:
            back = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            facts = json.loads(opened.metadata()["quern"])
        errors = []
        for broken in (
            {name: value for name, value in weights.items() if name != "head.weight"},
            weights | {"extra": weights["head.weight"]},
            weights | {"smear_scale": np.zeros(2, np.float32)},
        ):
            try:
                from_torch(broken, recipe.model, mesh)
            except ValueError as error:
                errors.append(str(error))
    shutil.rmtree(file.parent)
    return {
        "equal": back.keys() == weights.keys() and all(np.array_equal(back[n], weights[n]) for n in weights),
        "deviation": deviation(back, weights),
        "facts": facts,
        "errors": errors,
    }
