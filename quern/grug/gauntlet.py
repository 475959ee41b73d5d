"""The gauntlet: checks and measures the core or an experiment, a class of functions (`Grug` in state.py).

docs/grug.md says what it checks. A path of another platform is emulated: splash interpreted, cuDNN's call by XLA. The
measurements are on one device. The gauntlet does not measure a model's quality.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from quern.data.batch import Batch
from quern.grug.attention import AttentionMask, by_head, by_kv_head, choose, cudnn_attention, splash_attention, visible
from quern.grug.mesh import BATCH, batch_shards, make_mesh, place
from quern.grug.model import logits
from quern.grug.state import Grug, StepConfig, device_batch, init_state, loss_fn, measured_block, train_step
from quern.optim.schedule import Multipliers
from quern.process import peak_resident
from quern.recipe import ResolvedModel, ResolvedOptim
from quern.temporaries import write_whole

TOLERANCE = 1e-5  # relative error in fp32
ROWS = 8
OPTIM = ResolvedOptim(lr_scale=0.1, decay_scale=0.1, width_scale=1.0)
TINY = ResolvedModel(
    depth=2, width=32, heads=4, kv_heads=2, head_dim=8, vocab_size=62, context=16, bos=0, rope_base=1024.0,
    key_offset=True,
)  # fmt: skip
REFERENCE = replace(TINY, depth=4, width=256, kv_heads=4, head_dim=64, vocab_size=8192, context=512, windows="L")
"""The reference size of `quern bench`."""
BLOCKS, KERNEL = replace(TINY, context=600), replace(TINY, width=256, heads=2, kv_heads=1, head_dim=128, context=640)
"""Several blocks of queries, the last one cut, on every path; windows of a quarter cross them. Splash takes KERNEL."""
Case = tuple[str, ResolvedModel, str]
"""A platform, a shape, a dtype."""
CASES: tuple[Case, ...] = (
    *(("cpu", BLOCKS, dtype) for dtype in ("float32", "bfloat16", "float16")),
    ("gpu", BLOCKS, "bfloat16"),
    *(("tpu", KERNEL, dtype) for dtype in ("float32", "bfloat16")),
)
EMULATED: dict[Any, Callable[..., jax.Array]] = {
    cudnn_attention: partial(cudnn_attention, implementation="xla"),
    splash_attention: partial(splash_attention, interpret=True),
}
ROUNDINGS = 8
"""Roundings to the dtype on the way to one term of an output or a gradient: weights, their sum, the results of both
sides, in gradients also the scaled cotangent, the scores' cotangent and y; and one for an experiment's own factor."""


def run(core: type[Grug], name: str, out: Path, steps: int, log: Callable[[str], None]) -> bool:
    """Checks an experiment, times some steps, writes <out>/gauntlet/<name>.json; returns whether all checks passed."""
    log(f"checking {name}; each check is compiled first, which takes its time")
    checks: dict[str, dict[str, Any]] = {}
    with jax.default_matmul_precision("highest"):  # GPUs and TPUs round products of fp32 otherwise
        for part in (*(partial(check_attention, core, case) for case in CASES), partial(check, core)):
            for what, found in part().items():
                if what not in checks:
                    log(f"  {'ok  ' if found['passed'] else 'FAIL'} {what}: {found['value']:.3g} ({found['bar']})")
                checks[what] = found
    figures = measure(core, steps)
    for what, value in figures.items():
        log(f"  {what}: {value}")
    passed = all(found["passed"] for found in checks.values())
    body = {
        "experiment": name,
        "passed": passed,
        "checks": checks,
        "figures": figures,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = out / "gauntlet" / f"{name}.json"
    write_whole(path, json.dumps(body, indent=2) + "\n")
    log(f"{'passed' if passed else 'FAILED'}; record: {path}")
    return passed


def check_attention(core: type[Grug], case: Case) -> dict[str, dict[str, Any]]:
    """Returns value, bar and verdict of a case; the value is the worst deviation of an element over its bound."""
    platform, shape, dtype = case
    name, attend = f"attention for {platform}", _path_of(platform)
    if core.attention is not Grug.attention:  # an experiment's own: one path on every platform
        name, attend = "attention", core.attention
    worst = _worst(StepConfig(shape, OPTIM, dtype, None, core=core), attend, platform == "tpu")
    name = f"{name} = reference, {dtype}, {shape.context} tokens of {shape.head_dim} channels"
    return {name: _found(worst, 1.0, "≤ 1 of the bound")}


def _path_of(platform: str) -> Callable[..., jax.Array]:
    """The attention of a platform, emulated on others."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
        chosen = choose(platform, q, mask)
        here = platform == jax.default_backend()
        return (chosen if here else EMULATED.get(chosen, chosen))(q, k, v, mask)

    return attend


def _worst(cfg: StepConfig, attend: Callable[..., jax.Array], scaled: bool) -> float:
    """The worst deviation in any layer, forward and backward, on inputs that point at the edges of the layer's mask."""
    core = cfg.core

    def run(params: Any, tokens: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
        worst: list[jax.Array] = []

        def probe(q: jax.Array, _: jax.Array, __: jax.Array, mask: AttentionMask, *more: Any) -> jax.Array:
            inputs, results = (pointed(k, g.shape[2], mask.window or k.shape[1] // 2), k, v), []
            for function in (attend, core.reference_attention):
                y, pull = jax.vjp(lambda q, k, v, to=function: to(q, k, v, mask, *more), *inputs)
                results.append([x.astype(jnp.float32) for x in (y, *pull(g))])
            for found, expected, bound in zip(*results, bounds(*inputs, g, mask, scaled), strict=True):
                worst.append(jnp.max(jnp.abs(found - expected) / bound))
            return q

        core.forward(params, tokens, cfg.model, attend=probe)
        return jnp.max(jnp.stack(worst))

    shape, mesh, rng = cfg.model, single_mesh(), np.random.default_rng(0)
    with jax.set_mesh(mesh):

        def draw(size: tuple[Any, ...], spec: P) -> jax.Array:
            return place(rng.normal(size=size).astype(np.float32), spec, mesh).astype(cfg.dtype)

        params = jax.tree.map(
            lambda p: draw(p.shape, P() if p.sharding is None else p.sharding.spec),
            jax.eval_shape(lambda: core.init_parameters(shape, key=jax.random.key(0))),
        )
        tokens = device_batch(random_batch(shape, 0, 1, rows=1), 1, mesh)["tokens"][0]
        heads = (shape.kv_heads, shape.kv_heads, shape.heads)
        inputs = (draw((1, shape.context, n, shape.head_dim), P(BATCH, None, "model", None)) for n in heads)
        return float(jax.jit(run)(params, tokens, *inputs))


def pointed(k: jax.Array, heads: int, window: int) -> jax.Array:
    """Returns queries (B, T, heads, E) that resemble three keys: the last one in the window, the first one before it,
    and the one after the query's own position. An edge that is off by one key changes the output by a large share."""
    near = jnp.roll(k, window - 1, axis=1) + jnp.roll(k, window, axis=1) + jnp.roll(k, -1, axis=1)
    stacked = jnp.stack([near * 6 / k.shape[3] ** 0.5] * (heads // k.shape[2]), axis=3)
    return by_head(stacked).astype(k.dtype)


def bounds(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, mask: AttentionMask, scaled: bool
) -> list[jax.Array]:
    """Returns what rounding may change in each element of the output, and of the gradients of q, k and v, in one layer
    with this mask; g is the cotangent of the output, and q is rounded once more after the scale if `scaled` (splash).

    Each product is taken of absolute values, each weight is replaced by its largest error. A weight's relative error is
    ROUNDINGS · u, with u half an ulp of the dtype, plus the error of its score and the mean error of its row's scores.
    """
    (T, E), info = (q.shape[1], q.shape[-1]), jnp.finfo(q.dtype)
    u, least = float(info.eps) / 2, float(info.smallest_subnormal)
    q, k, v, g = (x.astype(jnp.float32) for x in (q, k, v, g))
    q, g, k_, v_ = by_kv_head(q, k.shape[2]), jnp.abs(by_kv_head(g, k.shape[2])), jnp.abs(k), jnp.abs(v)
    scores, largest = (jnp.einsum("bqkge,bske->bkgqs", *pair) * E**-0.5 for pair in ((q, k), (jnp.abs(q), k_)))
    weights = jax.nn.softmax(jnp.where(visible(mask, 0, T, 0, T), scores, -jnp.inf), axis=-1)
    of_score = (E * 2.0**-24 + scaled * u) * largest
    wrong = ROUNDINGS * u + T * 2.0**-24 + of_score + jnp.sum(weights * of_score, axis=-1, keepdims=True)
    wrong = weights * wrong + least
    y, dy = (jnp.einsum("bkgqs,bske->bqkge", x, v_) for x in (weights, wrong))
    inner, dinner = (jnp.einsum("bqkge,bqkge->bkgq", g, x)[..., None] for x in (y, dy))
    dscores = wrong * (jnp.einsum("bqkge,bske->bkgqs", g, v_) + inner) + weights * dinner + least
    dk = jnp.einsum("bkgqs,bqkge->bske", dscores, jnp.abs(q)) * E**-0.5
    dq = jnp.einsum("bkgqs,bske->bqkge", dscores, k_) * E**-0.5
    return [by_head(dy), by_head(dq), dk, jnp.einsum("bkgqs,bqkge->bske", wrong, g)]


def check(core: type[Grug]) -> dict[str, dict[str, Any]]:
    """Returns value, bar and verdict of each check of the model."""
    cfg, wide = StepConfig(TINY, OPTIM, "float32", None, core=core), make_mesh(model=2 - len(jax.devices()) % 2)
    host = random_batch(TINY, 0, batch_shards(wide))
    (fast, reference), loss, grads = _evaluated(cfg, host, single_mesh(), [core.attention, core.reference_attention])
    _, wide_loss, wide_grads = _evaluated(cfg, host, wide, [])
    silent = [path for path, g in grads.items() if not np.any(g)]
    infinite = [path for path, g in grads.items() if not np.all(np.isfinite(g))]
    gap = max(relative(wide_grads[path], g) for path, g in grads.items())
    bar = f"≤ {TOLERANCE:g} relative"
    return {
        "fast attention = reference, logits": _found(relative(fast, reference), TOLERANCE, bar),
        "gradients that are not finite": _found(len(infinite), 0, "none"),
        f"parameters without a gradient {silent}": _found(len(silent), 0, "none"),
        f"{wide.devices.size} devices = 1, loss": _found(relative(wide_loss, loss), TOLERANCE, bar),
        f"{wide.devices.size} devices = 1, worst gradient": _found(gap, TOLERANCE, bar),
        "loss after four steps, of the first": _found(_progress(cfg, host), 0.999, "≤ 0.999"),
    }


def measure(core: type[Grug], steps: int) -> dict[str, float]:
    """Measures seconds to the first step (with compilation), tokens per second and peak memory on one device."""
    platform, mesh = jax.default_backend(), single_mesh()
    dtype, context = "float32" if platform == "cpu" else "bfloat16", REFERENCE.context
    cfg = StepConfig(REFERENCE, OPTIM, dtype, None, measured_block(platform, dtype, context), core)
    with jax.set_mesh(mesh):
        state = jax.block_until_ready(init_state(0, cfg))
        batches = [device_batch(random_batch(REFERENCE, seed, 1), ROWS, mesh) for seed in range(2)]
        times = [time.perf_counter()]
        for step in range(steps + 2):
            state, metrics = train_step(state, batches[step % 2], Multipliers(), cfg)
            jax.block_until_ready(metrics)
            times.append(time.perf_counter())
    seconds = np.diff(times).tolist()
    usual = statistics.median(seconds[2:])
    # Of this process where the device does not count it.
    peak = (mesh.devices.flat[0].memory_stats() or {}).get("peak_bytes_in_use") or peak_resident()
    return {
        "seconds to first step": round(seconds[0], 3),
        "seconds per step": round(usual, 5),
        "tokens per second": round(ROWS * context / usual, 1),
        "peak memory MB": round(peak / 1e6, 1),
    }


def single_mesh() -> Mesh:
    """Returns a mesh of the first device."""
    return make_mesh(devices=jax.devices()[:1])


def random_batch(shape: ResolvedModel, seed: int, multiple: int, rows: int = ROWS) -> Batch:
    """Returns random tokens, `rows` rounded up to a multiple, with a tenth of the targets masked."""
    rng = np.random.default_rng(seed)
    rows = -(-rows // multiple) * multiple
    row_tokens = rng.integers(0, shape.vocab_size, (rows, shape.context + 1), dtype=np.int32)
    counts = rng.random((rows, shape.context)) < 0.9
    return Batch(row_tokens[:, :-1], row_tokens[:, 1:], counts)


def _evaluated(
    cfg: StepConfig, host: Batch, mesh: Mesh, paths: Sequence[Callable[..., jax.Array]]
) -> tuple[list[np.ndarray], float, dict[str, np.ndarray]]:
    """Logits on each path, loss and gradients, at perturbed weights: zero weights would zero other gradients."""
    core, shape = cfg.core, cfg.model

    def logits_of(params: Any, tokens: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        return logits(params, core.forward(params, tokens, shape, attend=attend), shape)

    with jax.set_mesh(mesh):
        params = jax.jit(partial(jax.tree.map, moved))(init_state(0, cfg).params)
        batch = jax.tree.map(lambda x: x[0], device_batch(host, len(host.tokens), mesh))
        outputs = [np.asarray(jax.jit(partial(logits_of, attend=path))(params, batch["tokens"])) for path in paths]
        loss, grads = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, batch, shape, forward=core.forward)))(params)
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        return outputs, float(loss), {jax.tree_util.keystr(path): np.asarray(g) for path, g in leaves}


def moved(p: jax.Array) -> jax.Array:
    """Adds noise to a parameter, the same on every mesh."""
    noise = np.random.default_rng(p.size).normal(size=p.shape).astype(np.float32)
    return p + 0.05 * jax.reshard(jnp.asarray(noise), jax.typeof(p).sharding.spec)


def _progress(cfg: StepConfig, host: Batch) -> float:
    with jax.set_mesh(mesh := single_mesh()):
        state, batch, losses = init_state(0, cfg), device_batch(host, len(host.tokens), mesh), []
        for _ in range(4):
            state, metrics = train_step(state, batch, Multipliers(), cfg)
            losses.append(float(metrics["loss"]))
    return losses[-1] / losses[0]


def relative(found: Any, expected: Any) -> float:
    """Returns the norm of the difference over the norm of `expected`."""
    scale = float(np.linalg.norm(expected))
    return float(np.linalg.norm(np.asarray(found) - expected)) / (scale or 1.0)


def _found(value: float, limit: float, bar: str) -> dict[str, Any]:
    return {"value": value, "bar": bar, "passed": bool(value <= limit)}
