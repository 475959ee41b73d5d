"""The gauntlet: checks and measures a single-file experiment.

The file defines (docs/grug.md):

    build_cfg(size)                      hashable, with vocab_size, context, batch_rows; "check" (tiny, fp32) or "speed"
    init_fn(cfg, key)                    → state, any pytree with `.params`, sharded over the current mesh
    fwd_fn(params, tokens, cfg, attend)  → fp32 logits (B, T, V)
    loss_fn(params, batch, cfg, attend)  → scalar; batch: tokens, targets, scale, each (B, T)
    train_step(state, batch, cfg)        → (state, metrics with "loss"), jitted
    attention, reference_attention       two functions to pass as `attend`

The checks, on tiny sizes: the fast attention gives the reference's logits, gradients are finite and reach every
parameter, a mesh of all devices equals one device, and steps on one batch lower the loss. The measurements, on one
device: time to first step, tokens per second, peak memory. The gauntlet does not measure a model's quality.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from quern.grug.loss import Batch
from quern.grug.mesh import BATCH, batch_shards, make_mesh, place
from quern.temporaries import write_whole

NAMES = ("build_cfg", "init_fn", "fwd_fn", "loss_fn", "train_step", "attention", "reference_attention")
TOLERANCE = 1e-5  # of fp32, relative


def run(file: Path, out: Path, steps: int, log: Callable[[str], None]) -> bool:
    """Checks an experiment, times `steps` steps and writes <out>/gauntlet/<name>.json.

    Returns whether every check passed.
    """
    module = load(file)
    checks = check(module)
    for name, found in checks.items():
        log(f"  {'ok  ' if found['passed'] else 'FAIL'} {name}: {found['value']:.3g} ({found['bar']})")
    figures = measure(module, steps)
    for name, value in figures.items():
        log(f"  {name}: {value}")
    passed = all(found["passed"] for found in checks.values())
    body = {
        "experiment": file.stem,
        "passed": passed,
        "checks": checks,
        "figures": figures,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = out / "gauntlet" / f"{file.stem}.json"
    write_whole(path, json.dumps(body, indent=2) + "\n")
    log(f"{'passed' if passed else 'FAILED'}; record: {path}")
    return passed


def load(file: Path) -> ModuleType:
    """Imports an experiment. Raises ValueError naming the functions that it does not define."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: give the path of an experiment, such as experiments/grug/core.py")
    spec = importlib.util.spec_from_file_location(f"gauntlet_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    missing = [name for name in NAMES if not callable(getattr(module, name, None))]
    if missing:
        raise ValueError(f"{file} does not define {', '.join(missing)}: docs/grug.md says what each must do")
    return module


def check(module: ModuleType) -> dict[str, dict[str, Any]]:
    """Returns value, bar and verdict of each check."""
    cfg = module.build_cfg("check")
    wide = widest_mesh()
    host = random_batch(cfg, 0, batch_shards(wide))
    one, many = (_losses_and_grads(module, cfg, host, mesh) for mesh in (single_mesh(), wide))
    silent = [path for path, g in one["grads"].items() if not np.any(g)]
    infinite = [path for path, g in one["grads"].items() if not np.all(np.isfinite(g))]
    gap = max(relative(many["grads"][path], g) for path, g in one["grads"].items())
    bar = f"≤ {TOLERANCE:g} relative"
    return {
        "fast attention = reference, logits": _found(relative(one["fast"], one["reference"]), TOLERANCE, bar),
        "gradients that are not finite": _found(len(infinite), 0, "none"),
        f"parameters without a gradient {silent}": _found(len(silent), 0, "none"),
        f"{wide.devices.size} devices = 1, loss": _found(relative(many["loss"], one["loss"]), TOLERANCE, bar),
        f"{wide.devices.size} devices = 1, worst gradient": _found(gap, TOLERANCE, bar),
        "loss after four steps, of the first": _found(_progress(module, cfg, host), 0.999, "below 1"),
    }


def measure(module: ModuleType, steps: int) -> dict[str, float]:
    """Measures seconds to the first step (with compilation), tokens per second and peak memory on one device."""
    cfg, mesh = module.build_cfg("speed"), single_mesh()
    with jax.set_mesh(mesh):
        state = jax.block_until_ready(module.init_fn(cfg, jax.random.key(0)))
        batches = [_placed(random_batch(cfg, seed, 1), mesh) for seed in range(2)]
        start = time.perf_counter()
        state, metrics = module.train_step(state, batches[0], cfg)
        jax.block_until_ready(metrics)
        first = time.perf_counter() - start
        seconds = []
        for step in range(steps + 1):
            start = time.perf_counter()
            state, metrics = module.train_step(state, batches[step % 2], cfg)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
    usual = statistics.median(seconds[1:])
    return {
        "seconds to first step": round(first, 3),
        "seconds per step": round(usual, 5),
        "tokens per second": round(cfg.batch_rows * cfg.context / usual, 1),
        "peak memory MB": round(_peak_bytes(mesh) / 1e6, 1),
    }


def single_mesh() -> Mesh:
    """Returns a mesh of the first device."""
    return make_mesh(devices=jax.devices()[:1])


def widest_mesh() -> Mesh:
    """Returns a mesh of all devices, with a `model` axis of 2 where their number is even."""
    count = len(jax.devices())
    return make_mesh(model=2 if count % 2 == 0 else 1)


def random_batch(cfg: Any, seed: int, multiple: int) -> dict[str, np.ndarray]:
    """Returns random tokens, cfg.batch_rows rounded up to a multiple, with a tenth of the targets masked."""
    rng = np.random.default_rng(seed)
    rows = -(-cfg.batch_rows // multiple) * multiple
    row_tokens = rng.integers(0, cfg.vocab_size, (rows, cfg.context + 1), dtype=np.int32)
    counts = rng.random((rows, cfg.context)) < 0.9
    scale = counts.astype(np.float32) / counts.sum()
    return {"tokens": row_tokens[:, :-1], "targets": row_tokens[:, 1:], "scale": scale}


def _losses_and_grads(module: ModuleType, cfg: Any, host: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
    """Logits on both paths, loss and gradients, at perturbed weights: zero weights would zero other gradients."""
    with jax.set_mesh(mesh):
        params = jax.tree.map(moved, module.init_fn(cfg, jax.random.key(0)).params)
        batch = _placed(host, mesh)
        forward = jax.jit(module.fwd_fn, static_argnums=(2, 3))
        objective = jax.jit(jax.value_and_grad(module.loss_fn), static_argnums=(2, 3))
        loss, grads = objective(params, batch, cfg, module.attention)
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        return {
            "fast": np.asarray(forward(params, batch["tokens"], cfg, module.attention)),
            "reference": np.asarray(forward(params, batch["tokens"], cfg, module.reference_attention)),
            "loss": float(loss),
            "grads": {jax.tree_util.keystr(path): np.asarray(g) for path, g in leaves},
        }


def moved(p: jax.Array) -> jax.Array:
    """Adds noise to a parameter, the same on every mesh."""
    noise = np.random.default_rng(p.size).normal(size=p.shape).astype(np.float32)
    return p + 0.05 * jax.reshard(jnp.asarray(noise), jax.typeof(p).sharding.spec)


def _progress(module: ModuleType, cfg: Any, host: dict[str, np.ndarray]) -> float:
    mesh = single_mesh()
    with jax.set_mesh(mesh):
        state, batch, losses = module.init_fn(cfg, jax.random.key(0)), _placed(host, mesh), []
        for _ in range(4):
            state, metrics = module.train_step(state, batch, cfg)
            losses.append(float(metrics["loss"]))
    return losses[-1] / losses[0]


def _placed(host: dict[str, np.ndarray], mesh: Mesh) -> Batch:
    return {name: place(array, P(BATCH, None), mesh) for name, array in host.items()}


def relative(found: Any, expected: Any) -> float:
    """Returns the norm of the difference over the norm of `expected`."""
    scale = float(np.linalg.norm(expected))
    return float(np.linalg.norm(np.asarray(found) - expected)) / (scale or 1.0)


def _found(value: float, limit: float, bar: str) -> dict[str, Any]:
    return {"value": value, "bar": bar, "passed": bool(value <= limit)}


def _peak_bytes(mesh: Mesh) -> float:
    """Peak memory of the device where it is counted, else of this process."""
    stats = mesh.devices.flat[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024  # kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
