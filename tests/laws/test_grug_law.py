"""Law: the JAX twin = PyTorch, from the same weights and batch; a mesh of devices = one device. In fp32, on a CPU.

The comparisons are in tests/grug/parity.py and run in JAX's own process.
"""

from typing import Any

import pytest

from tests.laws.table import Law
from tests.support.jax_process import Grug

BAR, CURVE_BAR = 1e-5, 1e-3
SHAPES: tuple[dict[str, Any], ...] = (
    {},  # grouped queries, a window
    {"depth": 3, "kv_heads": 1, "heads": 2, "head_dim": 16, "vocab_size": 61, "windows": "SL"},
    {"windows": "SL", "key_offset": True},
    {"windows": "SL", "bigrams": True},
)
ADAMW, DOCUMENTS = ("adamw_everywhere.py", "grug/adamw.py"), ("document_mask.py", "grug/documents.py")
UNCLIPPED = {"micro_rows": 8, "clip_norm": None}
MESH = "JAX twin, mesh of 2 to 8 devices = 1 device"


@pytest.mark.parametrize(
    ("name", "function", "how"),
    [
        *(("JAX twin = PyTorch", "forward_and_backward", {"model": shape}) for shape in SHAPES),
        # Training lets documents see each other on both sides; a mask of segments is PyTorch's context of documents.
        ("JAX twin = PyTorch, attention within documents", "segments", {}),
        ("JAX twin = PyTorch, weights after updates from the same gradients", "updates", {}),
        ("JAX twin = PyTorch, Muon", "direction", {}),
        ("JAX twin = PyTorch, a whole step in micro-batches", "whole_step", {"micro_rows": 3, "clip_norm": 0.01}),
        *(
            (f"JAX twin = PyTorch, a whole step of experiments/{files[1]}", "whole_step", UNCLIPPED | {"files": files})
            for files in (ADAMW, DOCUMENTS)
        ),
        ("JAX twin = PyTorch, AdamW for every parameter", "updates", {"files": ADAMW}),
        *((MESH, "on_mesh", {"name": mesh}) for mesh in ("data", "model", "all")),
        ("JAX twin, accumulation on a mesh = whole batch on 1 device", "on_mesh", {"name": "replica", "micro_rows": 4}),
        ("JAX twin, blockwise loss = whole", "blockwise", {}),
    ],
)
def test_the_twin_is_pytorch_on_any_mesh(grug: Grug, law: Law, name: str, function: str, how: dict[str, Any]) -> None:
    found = grug(f"parity:{function}", **how)
    for what, value in found.items() if isinstance(found, dict) else [("the change of one update", found)]:
        law(f"{name}: {what}", value, BAR, "relative, fp32")


@pytest.mark.parametrize(
    ("shown", "steps", "least"),
    [(80, "the first 80 of 300", 0.3), pytest.param(300, "300", 1.0, marks=pytest.mark.campaign)],
)
def test_the_curves_are_one(grug: Grug, law: Law, shown: int, steps: str, least: float) -> None:
    *gaps, learned = grug("parity:curves", steps=300, shown=shown)
    law(f"JAX twin = PyTorch, loss curves over {steps} steps", max(gaps), CURVE_BAR, "nats, fp32")
    assert learned > least
