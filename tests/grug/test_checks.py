"""The JAX twin's checks, which run in JAX's process (tests/support/jax_process.py) and assert there."""

import re
from pathlib import Path

import pytest

from tests.support.jax_process import Grug
from tests.support.line_server import ROOT

HERE = Path(__file__).parent
CHECKS = [
    f"{module}:{name}"
    for module in ("pieces", "gauntlet_checks", "verbs")
    for name in re.findall(r"^def (check_\w+)", (HERE / f"{module}.py").read_text(encoding="utf-8"), re.M)
]


@pytest.mark.parametrize("check", CHECKS)
def test_check(grug: Grug, check: str) -> None:
    grug(check)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "experiments/grug").glob("*.py")))
def test_every_experiment_passes_the_gauntlet(grug: Grug, name: str) -> None:
    grug("gauntlet_checks:passes", name=name)
