"""Law: the JAX twin = PyTorch, from the same weights and batch; a mesh of devices = one device. In fp32, on a CPU.

The comparisons are in tests/grug/parity.py and run in JAX's own process.
"""

from typing import Any

import pytest

from tests.laws.table import Law
from tests.support.jax_process import Grug

BAR, CURVE_BAR = 1e-5, 1e-3
SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries, a window": {},
    "three layers, one key for two heads, an odd vocabulary": {
        "depth": 3, "kv_heads": 1, "heads": 2, "head_dim": 16, "vocab_size": 61, "windows": "SL"
    },
    "key offset": {"windows": "SL", "key_offset": True},
}  # fmt: skip


def record(law: Law, name: str, found: dict[str, float]) -> None:
    for what, value in found.items():
        law(f"{name}: {what}", value, BAR, "relative, fp32")


@pytest.mark.parametrize("shape", SHAPES)
def test_jax_is_pytorch(grug: Grug, law: Law, shape: str) -> None:
    record(law, "JAX twin = PyTorch", grug("parity:forward_and_backward", model=SHAPES[shape]))


def test_documents_are_kept_apart_alike(grug: Grug, law: Law) -> None:
    """Training lets documents see each other on both sides; a mask of segments is PyTorch's context of documents."""
    record(law, "JAX twin = PyTorch, attention within documents", grug("parity:segments"))


def test_one_update_of_each_rule(grug: Grug, law: Law) -> None:
    record(law, "JAX twin = PyTorch, weights after updates from the same gradients", grug("parity:updates"))
    record(law, "JAX twin = PyTorch, Muon", {"the change of one update": grug("parity:direction")})


def test_a_whole_step(grug: Grug, law: Law) -> None:
    """With clipped gradients; the steps of the two ideas and of the curves do not clip."""
    found = grug("parity:whole_step", micro_rows=3, clip_norm=0.01)
    record(law, "JAX twin = PyTorch, a whole step in micro-batches", found)


@pytest.mark.parametrize("files", [("adamw_everywhere.py", "grug/adamw.py"), ("document_mask.py", "grug/documents.py")])
def test_ideas_in_both_libraries_are_one(grug: Grug, law: Law, files: tuple[str, str]) -> None:
    found = grug("parity:whole_step", micro_rows=8, clip_norm=None, files=files)
    record(law, f"JAX twin = PyTorch, a whole step of experiments/{files[1]}", found)
    if "adamw" in files[1]:
        record(law, "JAX twin = PyTorch, AdamW for every parameter", grug("parity:updates", files=files))


@pytest.mark.parametrize("mesh", ["data", "model", "all"])
def test_a_mesh_is_one_device(grug: Grug, law: Law, mesh: str) -> None:
    """One layer has every kind of parameter."""
    record(law, "JAX twin, mesh of 2 to 8 devices = 1 device", grug("parity:on_mesh", name=mesh))


def test_micro_batches_on_a_mesh(grug: Grug, law: Law) -> None:
    found = grug("parity:on_mesh", name="replica", micro_rows=4)
    record(law, "JAX twin, accumulation on a mesh = whole batch on 1 device", found)


def test_blockwise_loss_is_the_whole_one(grug: Grug, law: Law) -> None:
    record(law, "JAX twin, blockwise loss = whole", grug("parity:blockwise"))


@pytest.mark.parametrize(
    ("shown", "steps", "least"),
    [(80, "the first 80 of 300", 0.3), pytest.param(300, "300", 1.0, marks=pytest.mark.campaign)],
)
def test_the_curves_are_one(grug: Grug, law: Law, shown: int, steps: str, least: float) -> None:
    *gaps, learned = grug("parity:curves", steps=300, shown=shown)
    law(f"JAX twin = PyTorch, loss curves over {steps} steps", max(gaps), CURVE_BAR, "nats, fp32")
    assert learned > least
